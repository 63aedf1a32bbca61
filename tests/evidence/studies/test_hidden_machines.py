"""The tuner's study: what methods may know, what is counted, and the record behind the table."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace

import pytest

from autotune.adviser.adviser import Adviser
from autotune.constraints import needs_of
from autotune.online.trial_rules import TrialRules
from autotune.space import SearchSpace
from evidence.studies.hidden_machines import study as tuning_study
from evidence.studies.hidden_machines.machine import CASES, CONFIG, HiddenMachine, case_of
from evidence.studies.hidden_machines.methods import METHODS, START, Fixed, Problem
from evidence.studies.hidden_machines.results import findings, recovery, result_of, tables
from evidence.studies.hidden_machines.study import Contest, play, rows_of
from experiments.lab.finding import Verdict
from tests.autotune.worlds import a_stretch
from zenflow.errors import ConfigError

pytestmark = pytest.mark.usefixtures("simulated_once")
TINY = SearchSpace(
    topk_ratios=(0.05, 0.1, 0.5),
    update_intervals=(1, 4),
    select_intervals=(START.select_interval,),
)
SMALL = Contest(num_windows=4, num_trials=4, drift_at=2, space=TINY)
LIGHT = [name for name in METHODS if name != "GP"]
DESKTOP = next(place for place, case in enumerate(CASES) if "desktop" in case.machine)


def problem(seed=0, space=TINY, num_windows=4):
    return Problem.of(seed, space, num_windows, num_trials=4)


def row(method, regrets, final=0.0, over_default=(1.0,), *, seed=0, drifts=False):
    return {
        "seed": seed,
        "case": "a case",
        "method": method,
        "drifts": drifts,
        "regrets": list(regrets),
        "over_default": list(over_default),
        "final_regret": final,
        "search_seconds": 1.5,
    }


# ---- the truth ----------------------------------------------------------------------------------


def test_the_same_seed_is_the_same_machine_with_the_same_noise():
    one = HiddenMachine(1)
    first = [one.measure(START), one.measure(replace(START, topk_ratio=0.05))]
    for other in (one.afresh(), HiddenMachine(1)):
        assert [other.measure(stretch.knobs) for stretch in first] == first
    assert HiddenMachine(4).step_seconds(START) != one.step_seconds(START)  # of the same case


def test_a_drift_slows_both_directions_and_nothing_else():
    world = HiddenMachine(1)
    knobs = replace(START, topk_ratio=0.05)
    before, slow_before = world.measure(knobs), world.step_seconds(knobs)
    world.drift = 4.0
    after = world.measure(knobs)
    for lane, factor in (("d2h", 4.0), ("h2d", 4.0), ("device", 1.0)):
        ratio = after.busy_seconds[lane] / before.busy_seconds[lane]
        assert ratio == pytest.approx(factor, rel=0.3), lane
    assert world.step_seconds(knobs) > 1.2 * slow_before
    assert world.afresh().step_seconds(knobs) == slow_before


def test_measurements_vary_about_the_truth():
    world = HiddenMachine(0)
    stretches = [world.measure(START) for _ in range(40)]
    ratios = [s.step_seconds / world.step_seconds(START) for s in stretches]
    assert len(set(ratios)) == len(ratios)
    assert sorted(ratios)[20] == pytest.approx(1.0, abs=0.01)
    assert [s.index for s in stretches] == list(range(40))
    assert all(s.last_step == 12 * (s.index + 1) for s in stretches)


def test_step_time_holds_more_than_the_lanes_of_a_simulator_explain():
    world = HiddenMachine(1)
    knobs = list(TINY.grid())
    simulated = [world._simulated.forecast(each).step_seconds for each in knobs]
    off = [
        math.log(world.step_seconds(each) / told)
        for each, told in zip(knobs, simulated, strict=True)
    ]
    assert max(off) - min(off) > 0.02


# ---- what methods know --------------------------------------------------------------------------


def test_what_a_method_knows_does_not_depend_on_the_draw():
    mine, other = problem(0), problem(len(CASES))
    assert case_of(0) == case_of(len(CASES))
    assert replace(mine, seed=other.seed) == other


@pytest.mark.parametrize("seed", range(len(CASES)))
def test_every_setting_that_may_be_played_fits_the_machine(seed):
    found = problem(seed, space=Contest().space)
    assert START in found.settings
    need = needs_of(found.workload, found.profile, base=CONFIG)
    memory = found.profile.device.memory.value
    for knobs in found.settings:
        assert need(knobs).device_bytes <= memory
        assert need(knobs).host_bytes <= found.profile.host.dram_bytes.value
    if seed == DESKTOP:
        assert len(found.settings) < len(list(found.space.grid()))


def test_a_space_without_the_default_is_refused():
    with pytest.raises(ConfigError, match="the default must be among"):
        problem(space=replace(TINY, topk_ratios=(0.05,)))


class Replayed:
    """A machine that measures what a table says."""

    def __init__(self, seconds):
        self.seconds = seconds
        self.count = 0

    def measure(self, knobs):
        self.count += 1
        seconds = self.seconds(knobs, self.count)
        return a_stretch(self.count - 1, knobs, seconds, noise=0.001, rho=0.0)


def gp_where_it_can_be(names):
    has_scipy = importlib.util.find_spec("scipy") is not None
    skip = pytest.mark.skipif(not has_scipy, reason="GP needs scipy")
    return [pytest.param(name, marks=skip) if name == "GP" else name for name in names]


@pytest.mark.parametrize("name", gp_where_it_can_be(["random", "TPE", "GP"]))
def test_searches_keep_to_what_fits_and_end_with_the_best_measured(name):
    given = problem(DESKTOP, num_windows=15)
    assert not any(knobs.topk_ratio == 0.5 for knobs in given.settings)
    world = Replayed(lambda knobs, count: 1.0 if count == 12 else 2.0 + count)
    played = play(METHODS[name](given), world, replace(SMALL, num_windows=15), drifts=False)
    assert played.knobs[0] == START
    assert set(played.knobs) <= set(given.settings)
    assert len(set(played.knobs)) > 2
    assert played.final == played.knobs[11]


def test_the_twin_asks_for_nothing_once_no_stretch_is_left(monkeypatch):
    method = METHODS["twin"](replace(problem(1), num_windows=1))
    first = method.next_knobs()
    monkeypatch.setattr(TrialRules, "wants_advice", True)
    monkeypatch.setattr(Adviser, "advise", None)
    method.record(HiddenMachine(1).measure(first))
    assert method.final_knobs() == first


# ---- what is counted ----------------------------------------------------------------------------


def test_regret_is_against_the_best_of_the_machine_as_it_is_then():
    found = rows_of(SMALL, 1, ["default"], ["default"])
    steady, drifting = found
    world = HiddenMachine(1)
    before = world.truth(problem(1).settings)
    world.drift = SMALL.drift
    after = world.truth(problem(1).settings)
    own = max(before.values()) / before[START] - 1
    late = max(after.values()) / after[START] - 1
    assert steady["regrets"] == pytest.approx([own] * 4)
    assert drifting["regrets"] == pytest.approx([own] * 2 + [late] * 2)
    assert drifting["final_regret"] == pytest.approx(late)
    assert own != pytest.approx(late)
    assert steady["over_default"] == pytest.approx([1.0] * 4)


def test_searching_is_timed_and_the_machine_is_not(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(tuning_study.time, "process_time", lambda: float(next(clock)))
    world = Replayed(lambda knobs, count: float(next(clock)))
    played = play(Fixed(START), world, SMALL, drifts=False)
    assert played.search_seconds == 2 * SMALL.num_windows


def test_figures_by_hand():
    rows = [
        row("twin", [0.1, 0.0], 0.01, (1.0, 1.4), seed=0),
        row("twin", [0.3, 0.2], 0.03, (0.9, 0.8), seed=1),
        row("twin", [9.0, 9.0], 9.0, (9.0,), drifts=True),
    ]
    found = result_of(rows, "twin")
    assert found["seeds"] == 2
    assert found["slowdown"] == pytest.approx((0.15, 0.15, 0.25))
    assert found["final_regret"] == pytest.approx((0.02, 0.02, 0.03))
    assert found["worst_over_default"] == pytest.approx((1.4, 1.4))
    assert found["search_seconds"] == 1.5


@pytest.mark.parametrize(
    ("slowdown", "final", "worst", "failed"),
    [(0.05, 0.02, 1.3, 0), (0.051, 0.02, 1.3, 1), (0.05, 0.021, 1.3, 1), (0.05, 0.02, 1.31, 1)],
)
def test_an_aim_that_is_missed_is_said_to_be(slowdown, final, worst, failed):
    found = findings({"rows": [row("twin", [slowdown], final, (worst,))]})
    assert len(found) == 3
    assert sum(finding.verdict is Verdict.FAILS for finding in found) == failed


@pytest.mark.parametrize(
    ("late", "needed"),
    [([0.0, 0.0], 0), ([0.2, 0.05], 1), ([0.2, 0.0, 0.2, 0.04], 3), ([0.0, 0.06], math.inf)],
)
def test_a_way_back_counts_when_it_lasts(late, needed):
    assert recovery([0.9, 0.9, *late], 2) == needed


def test_the_drift_is_told_by_seed():
    rows = [row("twin", [0.0, 0.3, 0.01], seed=0, drifts=True),
            row("twin", [0.0, 0.2, 0.4], seed=1, drifts=True)]  # fmt: skip
    (line,) = tables({"rows": rows, "drift_at": 1})[-1].texts
    assert line == ["twin", "2", "0.0%", "25.0%", "20.5%", "never", "never", "never", "1"]


@pytest.mark.slow
def test_the_twin_reaches_its_aims_on_a_few_machines():
    rows = [row for seed in range(6) for row in rows_of(Contest(), seed, ["twin"], [])]
    found = findings({"rows": rows})
    assert len(found) == 3
    assert all(finding.verdict is Verdict.HOLDS for finding in found)
