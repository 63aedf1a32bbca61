"""Costs, memory and recordings that points share are each point's own."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.sweeps.columns import rounded
from experiments.sweeps.points import rows_of
from experiments.sweeps.shared import Shared
from sim.memory.need import memory_of
from sim.simulate import simulate
from sim.timing.costs import costs_of
from tests.experiments.swept import all_rows, sweep_of

AXES = {
    "gpu": ["rtx4090", "l40s"], "link": ["pcie3-x16", "pcie5-x16"], "link_rate": ["6", "40"],
    "host": ["epyc-7742", "desktop-ddr5"], "host_ram": ["12", "512"], "cores": ["4", "16"],
    "batch": ["1", "6"], "grad_accum": ["1", "2"], "checkpointing": ["yes", "no"],
    "tflops": ["60", "300"], "device.memory": ["9e9", "6e10"], "dtype": ["bfloat16", "float32"],
    "S": ["1", "2", "4"], "k": ["0.05", "0.3", "1"], "queue_depth": ["1", "2", "3"],
    "select_interval": ["0", "10", "50"], "overlap_step": ["yes", "no"],
    "update_rule": ["exact", "published"], "device_rate": ["300", "900"],
    "strategy": ["zenflow", "zero_offload", "superoffload"],
}  # fmt: skip
USUAL = ("gpu=rtx4090", "link=pcie4-x16", "host=epyc-7742")


@st.composite
def sweeps(draw):
    """A sweep of settings and parts of the machine."""
    names = draw(st.lists(st.sampled_from(sorted(AXES)), min_size=2, max_size=4, unique=True))
    axes = []
    for name in names:
        values = draw(st.lists(st.sampled_from(AXES[name]), min_size=1, max_size=2, unique=True))
        axes.append(f"{name}={','.join(values)}")
    fixed = [text for text in USUAL if text.split("=")[0] not in names]
    return sweep_of("model=gpt2", "sequence=512", *fixed, *axes)


@given(sweeps())
@settings(max_examples=12, deadline=None)
def test_points_are_as_by_themselves(sweep):
    for index, row in all_rows(sweep).items():
        assert row == dict(rows_of(sweep, [index]))[index]
        if row["status"] == "invalid":
            continue
        case = sweep.case(index)
        need = memory_of(case.workload, case.strategy, case.hardware)
        for name in ("device_bytes", "host_bytes"):
            assert row[name] == rounded(getattr(need, name)).item(), name
        assert row["status"] == ("does not fit" if need.fits(case.hardware) else "ok")
        if row["status"] == "ok":
            own = costs_of(case.workload, case.hardware)
            predicted = simulate(own, case.strategy, keeps_spans=False)
            for name in ("step_seconds", "stall_seconds", "selection_seconds"):
                assert row[name] == pytest.approx(
                    getattr(predicted, name), rel=1e-9, abs=1e-9 * predicted.step_seconds
                ), name


def test_what_an_axis_does_not_change_is_computed_once():
    sweep = sweep_of("link=pcie3-x16,pcie5-x16", "S=2,4", "batch=1,2", "select_interval=0,10")
    shared = Shared(sweep)
    for index in range(sweep.num_points):
        case = sweep.case(index)
        assert shared.costs(index, case) == costs_of(case.workload, case.hardware)
        shared.memory(index, case)
    assert len(shared._known) == 2 + 2 * 2  # costs by batch, needs by batch and S
