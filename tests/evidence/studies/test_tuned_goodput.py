"""What tuning claims on the real engine: the record, its aims, and a contest in small."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from evidence.studies.tuned_goodput.contests import SHORT, Contest, contest, drift
from evidence.studies.tuned_goodput.study import LEAST_OF_BEST, LINKS, SEEDS, STUDY, grid_of
from evidence.studies.tuned_goodput.turns import (
    GridPoint,
    Scripted,
    champion,
    measure_grid,
    side,
)
from experiments.lab.finding import Verdict
from experiments.lab.record import needed
from experiments.training.settings.training import TrainSettings
from zenflow.knobs import Knobs

SMALL = TrainSettings(model="tiny", sequence=32, batch_size=2, link=(0.02e9, 0.02e9), steps=40)


@pytest.fixture(scope="module")
def data():
    return needed("tuned_goodput").data(STUDY)


def test_there_is_a_record_of_every_link_and_three_seeds(data):
    found = {(item["link"], item["seed"]) for item in data["contests"]}
    assert found == {(link, seed) for link in LINKS for seed in SEEDS}
    assert not needed("tuned_goodput").commit.endswith("-dirty")
    assert data["links"]["fast"] == pytest.approx(4 * data["links"]["slow"])


@pytest.mark.parametrize("worse", ["", "fixed_best", "default", "searched", "windows"])
def test_it_is_said_which_aim_does_not_hold(data, worse):
    shares = {"fixed_best": 1.0, "default": 0.99, "searched": 0.009}
    if worse in shares:
        shares[worse] *= 1.15
    contests = [
        {
            **item,
            "fixed_best": shares["fixed_best"] * item["tuned"],
            "default": shares["default"] * item["tuned"],
            "search_seconds": shares["searched"] * item["run_seconds"],
        }
        for item in data["contests"]
    ]
    windows = [0, 3, None, 4 if worse == "windows" else 3, 9]
    drifts = [{**data["drifts"][0], "windows_until_back": number} for number in windows]
    found = [
        finding.verdict
        for finding in STUDY.findings({**data, "contests": contests, "drifts": drifts})
    ]
    order = [*shares, "windows"]
    fails = [name for name, v in zip(order, found, strict=True) if v is Verdict.FAILS]
    assert fails == [worse] * bool(worse)


def test_a_run_that_was_not_back_counts_with_all_its_windows(data):
    drifts = [
        {**data["drifts"][0], "windows_until_back": number, "regrets_by_window": [0.5] * 7}
        for number in (1, None, None)
    ]
    *_, recovery = STUDY.findings({**data, "drifts": drifts})
    assert recovery.emulated == 7
    assert "in 2 runs in none that were left" in STUDY.about({**data, "drifts": drifts})


def test_the_grid_has_35_settings_each_once_and_changes_k_seldom():
    for seed in range(3):
        grid = grid_of(seed)
        assert len(set(grid)) == len(grid) == 35
        changes = sum(a.topk_ratio != b.topk_ratio for a, b in itertools.pairwise(grid))
        assert changes == 4


def test_a_side_is_in_the_setting_it_is_told_and_counts_what_a_step_is_worth():
    start = Knobs.of(SMALL.config(None))
    script = Scripted(start)
    with side(SMALL, script) as run:
        first = run.take(6)
        script.wanted = replace(start, update_interval=8, topk_ratio=0.3)
        run.take(2)
        assert run.knobs == script.wanted
        later = run.take(12)
    assert len(first.seconds) == 6
    assert first.progress == pytest.approx(sum(first.worth) / sum(first.seconds))
    assert max(later.worth[2:]) < 1.0


def test_longer_windows_are_worth_less_per_step_in_a_measured_grid():
    start = Knobs.of(SMALL.config(None))
    short, long = measure_grid(SMALL, [replace(start, update_interval=s) for s in (1, 8)])
    assert short.step_seconds > 0
    assert short.progress * short.step_seconds > long.progress * long.step_seconds


def test_a_contest_runs_all_sides_and_counts_the_search(tmp_path):
    start = Knobs.of(SMALL.config(None))
    found = contest(SMALL, "slow", replace(start, update_interval=2), tmp_path, SHORT)
    assert isinstance(found, Contest)
    assert found.tuned > 0
    assert found.fixed_best > 0
    assert found.default > 0
    assert found.run_seconds > 0
    assert 0 < LEAST_OF_BEST < 1
    assert list(tmp_path.glob("*.jsonl"))


def test_a_lucky_figure_makes_no_champion():
    """What looked best by far is measured again, and is what it is."""
    start = Knobs.of(SMALL.config(None))
    lucky = GridPoint(knobs=start, step_seconds=1e-6, rho=0.5)
    other = GridPoint(knobs=replace(start, update_interval=8), step_seconds=1.0, rho=0.5)
    found = champion(SMALL, [other, lucky], rounds=2)
    assert found.knobs in (start, other.knobs)
    assert 1e-4 < found.step_seconds < 1.0


def test_after_a_drift_the_best_setting_runs_beside_the_tuned_run(tmp_path):
    start = Knobs.of(SMALL.config(None))
    settings = replace(SMALL, link=(0.1e9, 0.1e9))
    found = drift(settings, start, replace(start, topk_ratio=0.5), tmp_path, SHORT)
    assert len(found["regrets_by_window"]) == SHORT.drift_steps // found["steps_per_window"]
    assert all(regret > -1 for regret in found["regrets_by_window"])
