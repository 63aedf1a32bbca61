"""Shipped studies say what their tables say, and so do their committed records."""

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

import experiments
from experiments.sweeps import answers
from experiments.sweeps.axes import parse_axes
from experiments.sweeps.points import rows_of
from experiments.sweeps.run import Engine
from experiments.sweeps.studies import RECORD, STUDIES, chosen, run_study
from experiments.sweeps.table import CSV, read_table
from zenflow.errors import ConfigError

SMALL = {
    "pcie5-or-cpu": ["strategy=zero_offload,zenflow", "batch=1,4", "link=pcie4-x16,pcie5-x16",
                     "host=desktop-ddr5,epyc-9654"],
    "break-even": ["strategy=on_device,zero_offload,zenflow", "dram=25,400", "grad_accum=1,16"],
    "dram-for-gpu": ["deferred_moments=step,window", "gpu=rtx3090,b200-sxm", "dram=20:80:x2"],
    "cores-against-interval": ["deferred_moments=step,window", "cores=2,64", "S=1,8"],
}  # fmt: skip
RESULTS = Path(experiments.__file__).parent / "results"


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_leaves_a_record_that_is_not_made_again(name, tmp_path, capsys):
    study = STUDIES[name]
    study = replace(study, sweep=replace(study.sweep, axes=parse_axes(SMALL[name])))
    assert run_study(study, tmp_path, Engine(workers=1)) == 0
    folder = tmp_path / name
    assert {file.name for file in folder.iterdir()} == {CSV, RECORD, "picture.png"}
    record = json.loads((folder / RECORD).read_text())
    assert 2 <= len(record["answer"]) <= 4
    assert record["answer"] == study.answer(read_table(tmp_path / study.name, study.sweep.axes))
    assert record["finished"] == study.sweep.num_points
    before = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    capsys.readouterr()
    assert run_study(study, tmp_path, Engine(workers=1)) == 0
    assert before == {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert " ".join(record["answer"]) in " ".join(capsys.readouterr().out.split())
    with pytest.raises(ConfigError, match="other axes"):
        run_study(STUDIES[name], tmp_path, Engine(workers=1))


def committed():
    return sorted(RESULTS.glob(f"*_whatif_*/*/{RECORD}"))


@pytest.mark.parametrize("path", committed(), ids=lambda path: path.parent.name)
def test_a_committed_answer_is_what_its_table_says(path):
    study = STUDIES[path.parent.name]
    record = json.loads(path.read_text())
    assert record["sweep"] == json.loads(json.dumps(study.sweep.to_dict()))
    assert record["answer"] == study.answer(read_table(path.parent, study.sweep.axes))
    assert record["status"].get("failed", 0) == 0
    assert sum(record["status"].values()) == study.sweep.num_points


@pytest.mark.parametrize("path", committed(), ids=lambda path: path.parent.name)
def test_a_committed_table_is_what_the_simulator_says(path):
    study = STUDIES[path.parent.name]
    table = read_table(path.parent, study.sweep.axes)
    places = range(0, study.sweep.num_points, 1 + study.sweep.num_points // 6)
    rows = dict(rows_of(study.sweep, places))
    for index in places:
        line = table.iloc[index]
        assert line["status"] == rows[index]["status"]
        if rows[index]["status"] == "ok":
            assert line["step_seconds"] == pytest.approx(rows[index]["step_seconds"], rel=1e-6)


def test_a_study_is_found_by_name_or_nearly():
    assert [study.name for study in chosen("all")] == list(STUDIES)
    with pytest.raises(ConfigError, match="break-even"):
        chosen("breakeven_")


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
        deferred_moments=["step"] * 6, gpu=["a"] * 3 + ["b"] * 3, dram=[20.0, 40.0, 80.0] * 2,
        step_seconds=[1.0] * 6, stall_seconds=[0.5, 0.02, 0.0, 0.9, 0.6, 0.3],
    )  # fmt: skip
    assert answers.least_dram(frame) == {("step", "a"): pytest.approx(40.0), ("step", "b"): None}


def test_selections_do_not_count_as_waiting():
    frame = table(step_seconds=[2.0], stall_seconds=[0.5]).assign(selection_seconds=0.5)
    assert answers.waiting(frame).tolist() == [0.0]


def test_what_more_memory_bandwidth_does_not_help_is_said():
    rates = [20.0, 40.0, 80.0]
    frame = table(
        deferred_moments=["step"] * 6, gpu=["a"] * 3 + ["b"] * 3, dram=rates * 2,
        link_name=["pcie"] * 6, step_seconds=[1.0] * 6,
        stall_seconds=[0.8, 0.6, 0.2, 0.9, 0.3, 0.3],
    )  # fmt: skip
    frame = pd.concat([frame, frame.assign(deferred_moments="window")])
    said = " ".join(answers.dram_for_gpu(frame))
    assert "up to 80 is not enough on a and b" in said
    assert "b (pcie) still waits 30% of a step" in said
    assert "a (pcie)" not in said
