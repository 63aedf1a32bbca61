"""What may vary in a sweep, and what is refused before it begins."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.request.request import SYSTEM_OPTIONS, Request
from experiments.sweeps.axes.kinds import KINDS
from experiments.sweeps.axes.parsing import parse_axes, parse_axis
from experiments.sweeps.grid import Sweep
from sim.simulate import Strategy
from tests.experiments.swept import BASE, CARD, MODEL, run, sweep_of
from zenflow.errors import ConfigError


@given(
    low=st.integers(1, 1000), step=st.integers(1, 50), count=st.integers(0, 60),
    over=st.integers(0, 49),
)  # fmt: skip
def test_a_range_holds_every_step_from_its_beginning_to_its_end(low, step, count, over):
    high = low + count * step + min(over, step - 1)
    values = parse_axis(f"cores={low}:{high}:{step}").values
    assert list(values) == list(range(low, high + 1, step))


@given(low=st.floats(1e-3, 1e3), factor=st.floats(1.01, 10), count=st.integers(0, 20))
@settings(deadline=None)
def test_a_factors_range_begins_at_lo_and_ends_at_hi(low, factor, count):
    low, factor = float(f"{low:.6g}"), float(f"{factor:.6g}")
    high = low * factor**count
    values = parse_axis(f"dram={low:.17g}:{high:.17g}:x{factor:.17g}").values
    assert len(values) == count + 1
    assert values[0] == pytest.approx(low)
    assert values[-1] == pytest.approx(high)
    for before, after in itertools.pairwise(values):
        assert after / before == pytest.approx(factor, rel=1e-9)


def test_decimals_are_what_they_are_written_as():
    assert parse_axis("k=0:0.3:0.1").values == (0.0, 0.1, 0.2, 0.3)
    assert parse_axis("S=1:10:x1.5").values == (1, 2, 3, 5, 8)
    assert parse_axis("S=1,8,2,1").values == (1, 8, 2)


def test_a_share_of_layers_is_a_fraction_or_all_or_none():
    found = parse_axis("checkpointing=no,1/2,20/32,0.25,op,yes").values
    assert found == (False, 0.5, 0.625, 0.25, "op", True)
    for words, value in (("yes 1 32/32 1.0", True), ("no 0 0/4", False)):
        for word in words.split():
            (only,) = parse_axis(f"checkpointing={word}").values
            assert only is value


def test_names_are_spelt_as_the_table_spells_them():
    assert parse_axis("gpu=RTX 4090,a100").values == ("rtx4090", "a100-80-sxm")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("S", "write --vary"),
        ("hots=a", "nearest names are host"),
        ("s=1,2", "did you mean 'S'"),
        ("host=epic-7742", "epyc-7742"),
        ("link=25", "nearest|known are"),
        ("strategy=zenflw", "did you mean 'zenflow'"),
        ("S=0", "integer >= 1"),
        ("hysteresis=0,1", "nothing to vary"),
        ("S=1.5", "1.5"),
        ("k=1.5", "share"),
        ("dram=-5", "positive"),
        ("dram=nan", "positive"),
        ("cores=2.5", "whole"),
        ("checkpointing=perhaps", "yes, no, op, or a share.*1/2"),
        ("checkpointing=2", "every second one is 1/2"),
        ("checkpointing=1/0", "a share"),
        ("offload_activations=1", "yes or no"),
        ("dram=1:2", "lo:hi:step"),
        ("dram=2:1:1", "never ends"),
        ("dram=1:2:0", "never ends"),
        ("dram=1:2:x1", "never ends"),
        ("dram=0:2:x2", "never ends"),
        ("dram=1:1e9:1e-3", "more than"),
        ("model=llama2", "llama-2-7b"),
        ("update_rule=exact,publish", "published"),
    ],
)
def test_a_wrong_axis_is_refused_with_its_remedy(text, said):
    with pytest.raises(ConfigError, match=said):
        parse_axes([text])
    done = run(*BASE, *CARD, "--vary", text)
    assert done.exit_code == 2, done.output
    assert "Error" in done.output


@pytest.mark.parametrize("axes", [("S=1", "S=2"), ("k=0.1", "topk_ratio=0.2"),
                                  ("gpu=rtx4090", "machine=dgx-a100-80")])  # fmt: skip
def test_one_thing_is_varied_once(axes):
    with pytest.raises(ConfigError, match=r"same|one of them"):
        parse_axes(axes)


def test_every_axis_moves_the_machine_or_the_work():
    values = {
        "model": "mini", "gpu": "h100", "machine": "dgx-a100-40", "host": "epyc-9654",
        "link": "pcie3-x16", "fabric": "nvlink3", "nvme": "none", "dtype": "float32",
        "checkpointing": "yes", "kernels": "liger", "trainer": "trl",
        "strategy": "zero_offload", "k": "0.3", "topk_ratio": "0.3",
        "S": "8", "update_interval": "8", "queue_depth": "2", "overlap_step": "no",
        "update_rule": "published", "host_state": "compact", "select_interval": "7",
        "gradient_link": "e4m3", "uploads": "changed", "second_moment": "factored",
        "min_split_elements": "5000", "block_elements": "4096",
        "duplex": "0.5", "attention": "eager", "offload_activations": "yes",
        "lora_targets": "attention", "loss": "classes", "float32_master": "no",
        "gradients": "keep",
    }  # fmt: skip
    for name in KINDS:
        if name in (
            "num_gpus", "num_hosts", "fabric", "network", "parallel", "reshard_after_forward"
        ):  # fmt: skip
            continue  # these need several devices
        if name in ("stream", "resident_layers", "state_on_drive"):
            continue  # these need other knobs too
        varied = parse_axes([f"{name}={values.get(name, '6')}"])
        named = {**MODEL, **({} if name in ("gpu", "machine") else {"gpu": "l40s"})}
        if name == "model":
            del named["model"]
        strategy = "qlora" if name in SYSTEM_OPTIONS else "zenflow"
        strategy = "ddp" if name == "float32_master" else strategy
        if name != "strategy":
            named["strategy"] = strategy
        plain = Sweep(axes=(), request=Request(**MODEL, gpu="l40s", strategy=strategy))
        after = Sweep(axes=varied, request=Request(**named)).case(0)
        assert after != plain.case(0), name


def test_strategies_on_an_axis_take_the_settings_that_are_theirs():
    axes = parse_axes(
        ["strategy=zenflow,qlora,slideformer,ddp", "lora_rank=8", "float32_master=no", "S=2"]
    )
    sweep = Sweep(axes=axes, request=Request(**MODEL, gpu="l40s"))
    ours, theirs, streamed, narrow = (sweep.case(index).strategy for index in range(4))
    assert ours.config.update_interval == 2
    assert (theirs.options, streamed.options) == ({"lora_rank": 8}, {})
    assert narrow.options == {"float32_master": False}


def test_axes_of_several_devices_reach_the_machine_and_the_strategy():
    axes = parse_axes(["num_gpus=4,8", "num_hosts=1,2", "network=8x-roce-200,8x-infiniband-ndr",
                       "parallel=ddp,fsdp", "reshard_after_forward=yes,no",
                       "strategy=zenflow,fsdp2"])  # fmt: skip
    sweep = Sweep(axes=axes, request=Request(**MODEL, machine="dgx-a100-80"))
    for index in range(sweep.num_points):
        values = sweep.values(index)
        is_ours = values["strategy"] == "zenflow"
        if is_ours and values["parallel"] == "ddp" and not values["reshard_after_forward"]:
            with pytest.raises(ConfigError, match="give parallel fsdp as well"):
                sweep.case(index)
            continue
        case = sweep.case(index)
        hardware, strategy = case.hardware, case.strategy
        assert hardware.total_devices == values["num_gpus"] * values["num_hosts"]
        joined = values["network"] if values["num_hosts"] > 1 else None
        assert (hardware.network and hardware.network.name) == joined
        if is_ours:
            assert strategy.parallel == values["parallel"]
            assert strategy.reshards == values["reshard_after_forward"]
        else:  # another system keeps its own way beside ours
            assert strategy == Strategy.of("fsdp2")
    alone = Sweep(axes=axes[4:5], request=Request(**MODEL, gpu="l40s", strategy="fsdp2"))
    assert alone.case(1).strategy == Strategy.of("fsdp2", reshard_after_forward=False)


def test_the_grid_names_every_combination_once():
    sweep = sweep_of("S=1,2", "dram=20,40,80", "strategy=zenflow,zero_offload")
    seen = {tuple(sweep.values(index).items()) for index in range(sweep.num_points)}
    assert len(seen) == sweep.num_points == 12
    assert sweep.values(1) == {"S": 1, "dram": 20.0, "strategy": "zero_offload"}
