"""The figures that train small models: their arithmetic, and each of them in seconds."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evidence.paper.importance import gradient_shares as shares
from evidence.paper.loss import convergence, ingredients, sensitivity, zen_auto
from experiments.lab import catalogue
from experiments.lab.finding import Verdict
from experiments.lab.study import Cell, Job
from experiments.output.plots import save_figure
from zenflow.config import ZenFlowConfig

TRAINED = ("concentration", "sensitivity", "zen_auto", "convergence", "ingredients")

norms = st.lists(st.floats(0.01, 100), min_size=1, max_size=30).map(np.array)
steps = st.lists(norms, min_size=1, max_size=4)


@given(steps, st.floats(0.01, 1))
def test_no_choice_of_as_many_columns_keeps_more_than_the_best(step, share):
    masks = shares.best(step, share)
    others = [np.roll(mask, 1) for mask in masks]
    assert [m.sum() for m in masks] == [max(1, round(share * len(own))) for own in step]
    assert shares.kept(step, others) <= shares.kept(step, masks) + 1e-12
    assert shares.kept(step, [np.ones(len(own), dtype=bool) for own in step]) == pytest.approx(1)


def test_shares_of_a_gradient_that_can_be_counted_by_hand():
    gradient = torch.zeros(10, 10)
    gradient[:, 3] = 1.0
    gradient[0, 3] = 5.0
    assert shares.top_columns(shares.column_norms([gradient]))["0.1"] == 1.0
    entries = shares.top_entries([gradient])
    assert entries["0.01"] == pytest.approx(25 / 34)
    assert entries["0.1"] == pytest.approx(1.0)
    counts = shares.largest_by_column([gradient], 0.1)
    assert counts[0].tolist() == [0, 0, 0, 10, 0, 0, 0, 0, 0, 0]
    assert shares.covered(counts, [np.arange(10) == 3]) == 1.0
    assert shares.covered(counts, [np.arange(10) == 4]) == 0.0


def test_columns_that_stay_persist_and_columns_that_change_do_not():
    here, there = [np.array([9.0, 1.0])], [np.array([1.0, 9.0])]
    history = {1: here, 2: here, 3: there}
    assert shares.persistence(history, [1], [1, 2, 9], 0.5) == {
        "1": pytest.approx(1), "2": pytest.approx(1 / 9),
    }  # fmt: skip
    assert shares.averaged([here, here, there], 0.5)[0].argmax() == 1


def test_a_loss_is_reached_between_evaluations_or_not_at_all():
    curve = {"steps": [10, 20, 30], "seconds": [1.0, 3.0, 5.0], "eval_loss": [3.0, 2.0, 1.0]}
    assert convergence.reached(curve, 2.5) == pytest.approx(2.0)
    assert convergence.reached(curve, 4.0) == 1.0
    assert convergence.reached(curve, 0.5) is None


def test_a_strategy_as_good_by_step_and_twice_as_fast_is_there_in_half_the_time():
    slow = {"steps": [1, 2], "seconds": [2.0, 4.0], "eval_loss": [2.0, 1.0], "stall_share": 0.5}
    fast = {**slow, "seconds": [1.0, 2.0]}
    never = {**fast, "eval_loss": [2.0, 1.5]}
    data = {"curves": {"zero_offload": [slow], "zenflow": [fast], "auto": [never]}}
    assert convergence.speedup(data, "zenflow") == pytest.approx(2)
    assert convergence.speedup(data, "auto") is None
    assert convergence.final(data, "auto") == pytest.approx(1.5)


def test_what_never_reaches_the_loss_does_not_hold():
    slow = {"steps": [1], "seconds": [2.0], "eval_loss": [1.0], "stall_share": 0.5}
    curves = {name: [slow] for name in ("zero_offload", "zenflow_paper", "zenflow")}
    data = {"curves": {**curves, "auto": [{**slow, "eval_loss": [2.0]}]}}
    found = [f.verdict for f in convergence.STUDY.findings(data)]
    assert found == [Verdict.HOLDS] * 4 + [Verdict.FAILS] * 2


def test_windows_are_judged_early_and_late():
    run = {"eval_loss": 1.0, "device_eval_loss": 1.0}
    grown = {**run, "intervals": [1] * 10 + [2] * 40 + [4] * 40 + [6] * 10}
    stuck = {**run, "intervals": [2] * 100}
    found = zen_auto.STUDY.findings({"runs": {"from scratch": grown, "fine-tuning": stuck}})
    assert [finding.measured for finding in found] == pytest.approx([1, 4.4, 2, 2])
    verdicts = [finding.verdict for finding in found]
    assert verdicts == [Verdict.HOLDS, Verdict.HOLDS, Verdict.HOLDS, Verdict.FAILS]


def test_every_rung_is_a_valid_rule_and_differs_from_the_one_before():
    rules = [ZenFlowConfig.preset(rung.strategy, **rung.knobs) for rung in ingredients.RUNGS]
    assert len(set(map(str, rules))) == len(rules)
    ladder = [r for r, rung in zip(rules, ingredients.RUNGS, strict=True) if not rung.is_alone]
    assert ladder[1].overlap_step is False
    assert ladder[2].overlap_step is True
    assert ladder[1].topk_ratio == ladder[2].topk_ratio
    assert ladder[1].update_interval == ladder[2].update_interval


def test_a_cut_is_a_share_of_the_slower_step():
    rungs = {
        name: {"step_seconds": seconds}
        for name, seconds in (
            ("ZeRO-Offload", 4.0), ("interval alone", 2.0), ("overlap alone", 3.0),
            ("selection + interval", 1.5), ("+ overlap", 1.2),
        )
    }  # fmt: skip
    more, often = ingredients._engine_findings(rungs, {})
    assert more.emulated == pytest.approx(0.2)
    assert often.emulated == pytest.approx(2)
    assert more.simulated is None


def test_settings_that_were_not_run_leave_a_claim_open():
    point = {"rule": "zenflow", "interval": 4, "ratio": 0.1, "staleness": 4, "eval_loss": 1.0}
    found = sensitivity.STUDY.findings({"points": [{**point, "step_seconds": 1.0}]})
    assert [f.verdict for f in found].count(Verdict.UNKNOWN) == 3


@pytest.mark.usefixtures("blank_pictures")  # of the runs: the figure's own is drawn
@pytest.mark.parametrize("name", TRAINED)
def test_a_figure_is_made_in_seconds_goes_on_where_it_was_and_is_drawn(name, tmp_path):
    figure = catalogue.load(f"paper/{name}")
    said = []
    job = Job(folder=tmp_path, smoke=True, progress=lambda share, text: said.append(share))
    data = json.loads(json.dumps(figure.run(Cell(settings={}), job)))
    kept = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("summary.json")}
    for finding in figure.findings(data):
        assert finding.to_dict()["verdict"]
    save_figure(figure.draw(data), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    assert all(0 <= share <= 1 for share in said)
    assert said == sorted(said)
    assert kept
    if name == "sensitivity":  # the one with few runs stands for all: none is made again
        assert json.loads(json.dumps(figure.run(Cell(settings={}), job))) == data
        assert kept == {p: p.stat().st_mtime_ns for p in tmp_path.rglob("summary.json")}
