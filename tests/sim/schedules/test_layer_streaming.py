"""Streaming of layers: bytes and bounds by hand, memory and order of updates, several devices."""

from dataclasses import replace

import pytest

from sim.hardware.catalog import find_machine
from sim.memory.need import memory_of
from sim.models.table import find_model
from sim.models.workload import Workload
from sim.simulate import Strategy, simulate
from sim.timing.costs import costs_of
from sim.timing.host_memory import PROCESS_BYTES
from tests.sim.test_schedules import ENDLESS, LAYERS, MODEL, PARAMS, costs, near

NAMES = ("megatrain", "slideformer", "roundpipe")
UPLOADS = {"megatrain": 3, "slideformer": 2, "roundpipe": 2}
EACH = {"megatrain": 26 / 28, "slideformer": 38 / 28, "roundpipe": 40 / 28}
"""Bytes of DRAM of an update over those that `costs` takes its time from."""


def predict(found, name, **options):
    return simulate(found, Strategy.of(name, **options))


@pytest.mark.parametrize("name", NAMES)
def test_a_pass_moves_the_model(name):
    for accumulation in (1, 3):
        predicted = predict(costs(accumulation=accumulation), name)
        passes = 1 if name == "roundpipe" else accumulation
        assert predicted.h2d_bytes == near(passes * UPLOADS[name] * MODEL)
        assert predicted.d2h_bytes == near(passes * MODEL)


@pytest.mark.parametrize("name", NAMES)
def test_no_step_is_shorter_than_its_uploads(name):
    found = costs(h2d=200.0, d2h=ENDLESS, update=ENDLESS)
    uploads = UPLOADS[name] * 200.0
    taken = predict(found, name).step_seconds
    if name == "megatrain":  # of its backward nothing is loaded ahead: 40 s of work are in turn
        assert taken == near(uploads + 10 / LAYERS + 10 + 20)
    else:  # a layer's forward begins when it is there, and so does the last backward
        assert uploads < taken <= uploads + 20 / LAYERS + 2 * 200 / LAYERS


def test_a_fast_link_hides_all_loads_but_the_first():
    found = costs(h2d=5.0, d2h=ENDLESS, update=ENDLESS)
    for name in ("slideformer", "roundpipe"):
        assert predict(found, name).step_seconds == near(10 + 20 + 5 / LAYERS)
    # A load in turn before each of 20 works of backward.
    assert predict(found, "megatrain").step_seconds == near(10 + 10 + 20 + 2 * 5 + 5 / LAYERS)


def test_an_update_after_backward_hides_nothing_one_within_it_most_and_a_late_one_all():
    free = {"h2d": ENDLESS, "d2h": ENDLESS}
    step = {name: predict(costs(update=14.0, **free), name).step_seconds for name in NAMES}
    assert step["megatrain"] == near(40 + 14 * EACH["megatrain"])
    # The first layer's gradient comes last: its update holds up the next forward.
    assert step["slideformer"] == near(30 + 14 * EACH["slideformer"] / LAYERS)
    assert step["roundpipe"] == near(30)
    slow = predict(costs(update=60.0, **free), "roundpipe")
    assert slow.step_seconds == near(60 * EACH["roundpipe"])


def test_a_round_loads_once_for_all_micro_batches():
    found = costs(h2d=60.0, d2h=ENDLESS, update=ENDLESS, accumulation=8)
    assert predict(found, "roundpipe").step_seconds == near(8 * 30 + 60 / LAYERS)
    assert predict(found, "slideformer").step_seconds > 8 * 2 * 60


def test_several_devices_stream_the_whole_model_each_and_share_the_update():
    free = {"h2d": ENDLESS, "d2h": ENDLESS}
    found = costs(devices=4, update=28.0, **free)
    predicted = predict(found, "megatrain")
    assert predicted.h2d_bytes == near(3 * MODEL)
    # Reading a gradient, reading and writing the sum: 6 bytes of 28 take 6 s. Then a quarter.
    assert predicted.busy_seconds["host"] == near(6 + 26 / 4)


@pytest.mark.parametrize(
    ("name", "each"), [("megatrain", 14), ("slideformer", 12), ("roundpipe", 20)]
)
def test_host_bytes_per_parameter(name, each):
    work = Workload.of_config(*find_model("llama-2-7b"), checkpointing=True)
    need = memory_of(work, name, find_machine("dgx-a100-80", 1))
    parts = {p.name: p.num_bytes for p in need.parts}
    two_layers = 2 * 2 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096)
    assert parts["weights"] == two_layers
    # Gradients of two layers on their way down, and one layer's weights on theirs up.
    leaving = 1.5 * two_layers if name == "slideformer" else 0
    host = need.host_bytes - PROCESS_BYTES - leaving
    assert host == pytest.approx(each * work.num_params)


def test_memory_that_slideformers_port_measured():
    """flagos-ai/Megatron-LM-FL, docs/user-guide/slideformer_megatron_fl.md.

    Qwen3-8B, 64 times 1024 tokens: 91.54 GiB of states, 2.32 of gradients, 1.16 of weights and 18
    of activations on the host, 16.0 on the device. Kernels there are fused, and keep less of the
    layer that is computed again.
    """
    work = Workload.of_config(
        *find_model("qwen3-8b"), batch_size=64, checkpointing=True, offloads_activations=True
    )
    need = memory_of(work, "slideformer", find_machine("rtx4090-desktop", 1))
    found = {p.name: p.num_bytes / 2**30 for p in need.parts if p.place != "device"}
    assert found["optimizer state"] == pytest.approx(30.513 + 61.026, abs=0.01)
    assert found["gradients"] == pytest.approx(2.318, abs=0.001)
    assert found["weights to upload"] == pytest.approx(1.159, abs=0.001)
    assert found["offloaded activations"] == pytest.approx(18 * 34 / 36)  # the last two stay
    recomputed = next(p.num_bytes for p in need.parts if p.name == "recomputed layer")
    assert need.device_bytes - recomputed < 16.0 * 2**30 < need.device_bytes


def test_a_model_larger_than_the_device_streams():
    work = Workload.of_config(*find_model("llama-2-70b"), checkpointing=True)
    machine = find_machine("hgx-h100", 1)
    need = memory_of(work, "slideformer", machine)
    assert not need.fits(machine)
    seconds = simulate(costs_of(work, machine), Strategy.of("slideformer")).step_seconds
    assert seconds > 2 * work.model_bytes / machine.link.h2d.value
    short = memory_of(work, "published_zero_offload", machine).fits(machine)
    assert any("--stream" in remedy for item in short for remedy in item.remedies)


def test_a_faster_link_never_makes_a_step_longer():
    for name in NAMES:
        found = costs(h2d=40.0, d2h=40.0, update=50.0)
        faster = replace(found, hardware=found.hardware.with_values({"link.h2d": MODEL / 20}))
        assert predict(faster, name).step_seconds < predict(found, name).step_seconds
    assert PARAMS * 2 == MODEL
