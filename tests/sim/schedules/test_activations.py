"""What becomes of activations: kept, computed once more, or sent to the host and back."""

from dataclasses import replace

import numpy as np
import pytest

from sim.hardware.catalog import find_machine
from sim.memory.engine import engine_memory
from sim.memory.need import memory_of
from sim.memory_parts import ACTIVATION_BUFFERS
from sim.models.activations import Activations
from sim.models.table import find_model
from sim.models.work import Work
from sim.models.workload import Workload
from sim.planning.estimates import estimated_seconds
from sim.replay.arrays import rates_of
from sim.replay.tape import CannotRecordError, times_of
from sim.simulate import Strategy, simulate
from sim.steady import steady_many
from sim.timing.costs import costs_of
from tests.sim.memory.test_need import saved_bytes
from tests.sim.test_schedules import ANYWHERE, ENDLESS, LAYERS, costs, near
from zenflow.errors import ConfigError

MACHINE = find_machine("dgx-a100-80", 1)
WORK = Workload.of_config(*find_model("llama-2-7b"), batch_size=4, sequence=2048)
AWAY = replace(WORK, offloads_activations=True)
DEVICE_ONLY = ("published_on_device", "adamw_8bit", "lora")


# ---- selective recomputation --------------------------------------------------------------------


def test_kept_scores_are_korthikantis():
    """Korthikanti et al. 2022, equation 1: sbh (34 + 5 as/h), of which 5as/h are scores."""
    name, config = find_model("opt-1.3b")
    config |= {"attention_dropout": 0.1}
    plain = Workload.of_config(name, config, batch_size=3, sequence=512)
    eager = replace(plain, attention="eager")
    kept = [Activations(work).kept_bytes()[1] for work in (plain, eager)]
    tokens, width, heads = 3 * 512, 2048, 32
    assert kept[0] == 34 * tokens * width
    assert kept[1] == tokens * width * (34 + 5 * heads * 512 / width)


def test_attentions_share_of_flop_is_korthikantis():
    """Appendix A has s / 6h of GPT-3's and MT-NLG's FLOP: 2.7 and 1.6 %.

    That is attention's part of forward and backward, and all that recomputing it could add.
    """
    for width, heads, sequence in ((12288, 96, 2048), (20480, 128, 2048)):
        config = {
            "model_type": "gpt2", "n_embd": width, "n_head": heads, "n_layer": 1,
            "vocab_size": 50257, "n_positions": sequence,
        }  # fmt: skip
        work = Workload.of_config("gpt", config, sequence=sequence, attention="eager")
        layer = Work(work).all()[1]
        assert layer.attention_flop / layer.matmul_flop == pytest.approx(sequence / (6 * width))


def test_kept_scores_spare_backward_a_product_of_queries_and_keys():
    free = MACHINE.with_values({"device.bandwidth": 1e18, "device.launch": 1e-12})
    work = replace(WORK, is_causal=False)
    seconds = [
        costs_of(each, free).backward_seconds for each in (work, replace(work, attention="eager"))
    ]
    rate = free.device.attention_rate("bfloat16", is_backward=True)
    attention = sum(layer.attention_flop for layer in Work(work).all()) / rate
    assert seconds[0] - seconds[1] == pytest.approx(0.5 * attention, rel=1e-4)


def test_scores_that_are_kept_take_memory_where_layers_are_not_recomputed():
    policies = {
        "none": replace(WORK, attention="eager"),
        "selective": WORK,
        "full": replace(WORK, checkpointing=True),
    }
    kept = {name: sum(Activations(work).kept_bytes()) for name, work in policies.items()}
    assert kept["none"] > kept["selective"] > 10 * kept["full"] / 2
    taken = {name: costs_of(work, MACHINE).backward_seconds for name, work in policies.items()}
    assert taken["full"] > taken["selective"]


def test_an_unknown_attention_is_refused():
    with pytest.raises(ConfigError, match="'flash' is unknown"):
        replace(WORK, attention="flash")


# ---- activations on the host ------------------------------------------------------------------


def away(found, total):
    """Return costs whose layers, but for the last two, send this many bytes away."""
    segments = [
        replace(segment, leaving=total / LAYERS if index < LAYERS - 2 else 0.0)
        for index, segment in enumerate(found.segments)
    ]
    return replace(found, segments=tuple(segments))


SHARDED = [
    *(Strategy.of(name) for name in ("fsdp2", "fsdp2_offload", "zero3_offload")),
    Strategy.of("zenflow", parallel="fsdp"),
]
SENDING = list(ANYWHERE)


@pytest.mark.parametrize("strategy", SHARDED, ids=str)
@pytest.mark.parametrize("devices", [1, 4])
def test_with_sharded_weights_every_device_sends_its_own(devices, strategy):
    machine, works = find_machine("dgx-a100-80", devices), (AWAY, WORK)
    machine = machine.with_values({"link.d2h": 2e9, "link.h2d": 2e9})
    found, plain = (simulate(costs_of(w, machine), strategy, keeps_spans=False) for w in works)
    sent = sum(Activations(AWAY).leaving_bytes())
    for way in ("d2h_bytes", "h2d_bytes"):
        assert getattr(found, way) - getattr(plain, way) == pytest.approx(sent, rel=1e-6)
    # A layer waits for the copy of the one before the last, down in forward and up in backward.
    inner = sum(1 for size in Activations(AWAY).leaving_bytes() if size) - ACTIVATION_BUFFERS
    layer = max(Activations(AWAY).leaving_bytes())
    assert found.step_seconds > 2 * inner * layer / 2e9
    assert found.stall_seconds > plain.stall_seconds


@pytest.mark.parametrize("strategy", SHARDED, ids=str)
def test_with_sharded_weights_a_fast_link_hides_them(strategy):
    machine = find_machine("dgx-a100-80", 4)
    fast = {"link.d2h": 1e15, "link.h2d": 1e15, "host.dram": 1e16, "link.latency": 1e-12,
            "overheads.copy": 1e-12}  # fmt: skip
    machine = machine.with_values(fast)
    found, plain = (
        simulate(costs_of(work, machine), strategy, keeps_spans=False) for work in (AWAY, WORK)
    )
    # The engine packs and unpacks its own copies, which activations' wait behind. They also wait
    # behind sums of gradients that stage 3 has asked for.
    waits = strategy.config is not None or strategy.name == "zero3_offload"
    near_enough = 0.03 if waits else 1e-3
    assert found.step_seconds == pytest.approx(plain.step_seconds, rel=near_enough)


def test_they_share_the_link_with_collectives_where_that_is_the_fabric():
    work, rate = replace(AWAY, batch_size=1), 4e9
    machine = find_machine("l40s-server", 4).with_values({"link.d2h": rate, "link.h2d": rate})
    found = simulate(costs_of(work, machine), Strategy.of("fsdp2"), keeps_spans=False)
    # Two all-gathers and a reduce-scatter pass 3/4 of each layer on, but for one of the last's.
    last = work.layers[-1].numel * work.dtype_bytes
    ring = 0.75 * (3 * work.model_bytes - last)
    sent = sum(Activations(work).leaving_bytes())
    assert found.step_seconds > (sent + ring) / rate
    alone = find_machine("hgx-h100", 4).with_values({"link.d2h": rate, "link.h2d": rate})
    apart = simulate(costs_of(work, alone), Strategy.of("fsdp2"), keeps_spans=False)
    assert apart.step_seconds < (sent + ring) / rate


def test_all_but_the_last_layers_activations_cross_the_link_twice():
    layer = Activations(WORK).kept_bytes()[1]
    assert Activations(AWAY).leaving_bytes() == [0.0, *[layer] * 30, 0.0, 0.0, 0.0]
    for name in SENDING:
        found, plain = (
            simulate(costs_of(work, MACHINE), Strategy.of(name), keeps_spans=False)
            for work in (AWAY, WORK)
        )
        for way in ("d2h_bytes", "h2d_bytes"):
            more = getattr(found, way) - getattr(plain, way)
            assert more == pytest.approx(30 * layer, rel=1e-6), name


def test_memory_of_two_layers_is_left_on_the_device():
    need, plain = (memory_of(work, "qlora", MACHINE) for work in (AWAY, WORK))
    own, before = ({p.name: p.num_bytes for p in n.parts} for n in (need, plain))
    sent = sum(Activations(AWAY).leaving_bytes())
    assert own["offloaded activations"] == sent
    assert before["activations"] - own["activations"] == pytest.approx(sent)
    assert own["activation buffers"] == ACTIVATION_BUFFERS * Activations(AWAY).kept_bytes()[1]


@pytest.mark.parametrize("name", DEVICE_ONLY)
def test_copies_hide_behind_compute_where_the_link_keeps_up(name):
    plain = costs(d2h=ENDLESS, h2d=ENDLESS, update=ENDLESS)
    fast = away(plain, 1.0)
    assert predict(fast, name).step_seconds == near(predict(plain, name).step_seconds)


def predict(found, name):
    return simulate(found, Strategy.of(name))


@pytest.mark.parametrize("name", DEVICE_ONLY)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_step_is_no_shorter_than_the_copies_of_activations(name, accumulation):
    # A copy each way takes 10 s for a million bytes of each of 8 layers.
    found = costs(d2h=20.0, h2d=20.0, accumulation=accumulation)
    found = away(found, 10e6)
    each = 8 * 1.0
    predicted = predict(found, name)
    assert predicted.busy_seconds["d2h"] == near(accumulation * each)
    slow = away(costs(d2h=200.0, h2d=200.0, accumulation=accumulation), 10e6)
    predicted = predict(slow, name)
    assert predicted.step_seconds > accumulation * 2 * 10 * each
    assert predicted.stall_seconds > accumulation * (2 * 10 * each - 30)
    stalls = predicted.timeline.stalls()
    assert set(stalls) == {"d2h", "h2d"}


def test_activations_share_the_link_with_gradients_and_uploads():
    sent = away(costs(d2h=20.0, h2d=20.0), 10e6)
    alone, both = (
        predict(sent, name).step_seconds for name in ("adamw_8bit", "published_zero_offload")
    )
    plain = predict(costs(d2h=20.0, h2d=20.0), "published_zero_offload").step_seconds
    assert both > plain
    assert both > alone


@pytest.mark.parametrize("name", [n for n in SENDING if n != "published_zero_infinity"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_stalls_and_work_add_up_to_the_step(name, accumulation):
    found = costs(d2h=30.0, h2d=40.0, update=80.0, on_device=6.0, accumulation=accumulation)
    found = away(found, 10e6)
    options = {"select_interval": 0} if name in ("zenflow", "zenflow_paper") else {}
    predicted = simulate(found, Strategy.of(name, **options))
    assert predicted.busy_seconds["device"] + predicted.stall_seconds == near(
        predicted.step_seconds
    )
    steps = len({span.step for span in predicted.timeline.spans if span.lane == "device"})
    stalls = sum(predicted.timeline.stalls().values()) / steps
    assert stalls == pytest.approx(predicted.stall_seconds, abs=1e-6)


def test_such_a_step_is_not_recorded_and_estimates_count_the_copies():
    strategy = Strategy.of("zenflow", select_interval=0)
    sent, plain = costs_of(AWAY, MACHINE), costs_of(WORK, MACHINE)
    machine = np.array([rates_of(plain)]), np.array([times_of(plain)])
    assert steady_many(plain, strategy, *machine).step_seconds[0] > 0
    with pytest.raises(CannotRecordError, match="activations"):
        steady_many(sent, strategy, *machine)
    slow = MACHINE.with_values({"link.d2h": 1e9, "link.h2d": 1e9})
    shapes = [p.shape for p in WORK.parameters]
    own = engine_memory(shapes, strategy.config, 2)
    bounds = [estimated_seconds(costs_of(work, slow), strategy, own) for work in (WORK, AWAY)]
    assert bounds[1] - bounds[0] > sum(Activations(AWAY).leaving_bytes()) / 1e9


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_eager_scores_are_those_that_autograd_keeps_of_transformers_llama(dtype):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    shape = {
        "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 300,
        "intermediate_size": 176, "num_key_value_heads": 4,
    }  # fmt: skip
    config = transformers.AutoConfig.for_model("llama", **shape)
    ids = torch.randint(300, (3, 128), generator=torch.Generator().manual_seed(0))
    kept = []
    for attention in ("sdpa", "eager"):
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=attention
        ).to(getattr(torch, dtype))
        kept.append(saved_bytes(model, ids, lambda: model(ids, use_cache=False)))  # noqa: B023
    settings = {"batch_size": 3, "sequence": 128, "dtype": dtype}
    works = [
        Workload.of_config("llama", config.to_dict(), attention=name, **settings)
        for name in ("fused", "eager")
    ]
    ours = [sum(Activations(work).kept_bytes()) for work in works]
    assert kept[1] - kept[0] == pytest.approx(ours[1] - ours[0], rel=0.02)
