"""What-if studies say what their tables say."""

import pandas as pd
import pytest

from experiments.lab import catalogue
from experiments.lab import record as records
from experiments.lab.study import Scope
from experiments.sweeps import answers


@pytest.mark.parametrize("key", catalogue.names(catalogue.WHAT_IF))
def test_a_committed_row_is_what_the_simulator_says(key):
    study, kept = catalogue.load(key), records.committed(key)
    if not kept.is_of(study):
        pytest.skip("it is of a former rule: the study is to be made anew")
    cells = study.cells(study.scope(Scope()))
    step = 1 + len(cells) // 6
    for cell, row in list(zip(cells, kept.rows, strict=True))[::step]:
        found = {**cell.settings, **study.run(cell, None)}
        assert row == {name: pytest.approx(value, rel=1e-6) if isinstance(value, float) else value
                       for name, value in found.items()}  # fmt: skip


def test_a_crossing_lies_where_ratios_pass_the_level_for_good():
    assert answers.crossing([1, 2, 4, 8], [5, 1, 3, 1], 2) == pytest.approx(4 * 2**0.5, rel=1e-5)
    assert answers.crossing([1, 2], [3, 2.5], 2) is None
    assert answers.crossing([1, 2], [1.5, 1.0], 2) == 1


def table(**columns):
    frame = pd.DataFrame(columns)
    return frame.assign(status="ok", reason="", selection_seconds=0.0)


def test_link_or_host_names_what_saves_more():
    hosts, links = ["slow", "slow", "fast", "fast"], ["old", "new", "old", "new"]
    for steps, winner in (
        ([10.0, 9.0, 5.0, 5.0], "the host"),
        ([10.0, 4.0, 9.0, 3.0], "the link"),
    ):
        frame = table(strategy=["zenflow"] * 4, batch=[4] * 4, host=hosts, link=links,
                      step_seconds=steps)  # fmt: skip
        said = answers.link_or_host(frame, link="old", faster_link="new", host="slow", batch=4)
        assert f"{winner} helps more" in said[0]
        assert f"new saves {1 - steps[1] / 10:.1%}" in said[0]
        assert f"fast {1 - steps[2] / 10:.1%}" in said[0]
    frame.loc[[0, 2], ["status", "reason"]] = ["does not fit", "small"]
    frame = pd.concat([frame, frame.assign(batch=4, strategy="other", status="ok")])
    frame.loc[(frame["strategy"] == "zenflow"), "batch"] = 1
    said = answers.link_or_host(frame, link="old", faster_link="new", host="slow", batch=4)
    assert "zenflow 1 sequence with new only" in said[-1]


def test_least_dram_is_where_the_wait_ends_for_good():
    frame = table(
        queue_depth=[1] * 6, gpu=["a"] * 3 + ["b"] * 3, dram=[20.0, 40.0, 80.0] * 2,
        step_seconds=[1.0] * 6, stall_seconds=[0.5, 0.02, 0.0, 0.9, 0.6, 0.3],
    )  # fmt: skip
    assert answers.least_dram(frame) == {(1, "a"): pytest.approx(40.0), (1, "b"): None}


def test_selections_do_not_count_as_waiting():
    frame = table(step_seconds=[2.0], stall_seconds=[0.5]).assign(selection_seconds=0.5)
    assert answers.waiting(frame).tolist() == [0.0]


def test_what_more_memory_bandwidth_does_not_help_is_said():
    rates = [20.0, 40.0, 80.0]
    frame = table(
        queue_depth=[1] * 6, gpu=["a"] * 3 + ["b"] * 3, dram=rates * 2,
        link_name=["pcie"] * 6, step_seconds=[1.0] * 6,
        stall_seconds=[0.8, 0.6, 0.2, 0.9, 0.3, 0.3],
    )  # fmt: skip
    frame = pd.concat([frame, frame.assign(queue_depth=8)])
    said = " ".join(answers.dram_for_gpu(frame))
    assert "up to 80 is not enough on a and b" in said
    assert "b (pcie) still waits 30% of a step" in said
    assert "a (pcie)" not in said
