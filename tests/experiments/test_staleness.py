"""The study of what late updates cost: its arithmetic, its record, and all of it on short runs."""

import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from experiments import staleness
from experiments.staleness import main, settings_by_part, tasks_of
from experiments.staleness_fit import Exchange, Linear, Power, Setting, fit
from zenflow.config import ZenFlowConfig
from zenflow.errors import ConfigError
from zenflow.knobs import Knobs

RECORDS = sorted(Path(staleness.__file__).parent.glob("results/*_staleness_*"))


def setting(interval, lag, rho, cost, *, lr=1e-3):
    config = ZenFlowConfig(update_interval=interval, lag=lag)
    return Setting(
        lr=lr, knobs=Knobs.of(config), seeds=(0,), rho=rho, loss=1.0, excess=0.0,
        efficiencies=(1 / (1 + cost),),
    )  # fmt: skip


def costing(formula):
    """Return settings that cost exactly what the formula says."""
    return [
        setting(interval, lag, rho, formula.cost(interval, lag, rho))
        for interval in (1, 2, 4, 16)
        for lag in (1, 2, 8)
        for rho in (0.4, 0.8)
        if lag <= interval
    ]


def row(steps, loss, *, seed=0, lr=1e-3, captured=0.25, strategy="zenflow", **knobs):
    config = ZenFlowConfig.preset(strategy, **knobs).to_dict()
    return {
        "lr": lr, "seed": seed, "steps": steps, "eval_loss": loss, "captured_energy": captured,
        "config": config,
    }  # fmt: skip


def on_device(steps, loss, **where):
    return row(steps, loss, strategy="on_device", **where)


@given(st.floats(0.01, 1), st.floats(-0.004, 1), st.floats(0.3, 1))
def test_an_excess_is_told_as_the_share_of_steps_that_has_it(linear, curved, share):
    x = math.log(1 / share)
    found = Exchange(linear, curved, 0.3).share(linear * x + curved * x**2)
    assert found == pytest.approx(share)


def test_the_exchange_rate_is_recovered_from_runs_that_follow_one():
    shares = (0.4, 0.6, 0.8, 0.9)
    excesses = [0.1 * math.log(1 / s) + 0.02 * math.log(s) ** 2 for s in shares]
    found = Exchange.fitted(shares, excesses)
    assert (found.linear, found.curved) == pytest.approx((0.1, 0.02))
    assert found.least_share == 0.4
    with pytest.raises(ConfigError, match="two lengths"):
        Exchange.fitted((0.4, 0.4), (0.1, 0.2))


def test_a_loss_below_the_devices_is_an_efficiency_above_1():
    assert Exchange(0.1, 0.02, 0.4).share(-0.001) > 1


@pytest.mark.parametrize("formula", [Linear(0.01, 0.05), Linear(0.0, 0.1), Linear(0.02, 0.0)])
def test_linear_costs_give_their_constants_back(formula):
    found = Linear.fitted(costing(formula))
    assert (found.a, found.b) == pytest.approx((formula.a, formula.b), abs=1e-9)


@pytest.mark.parametrize("formula", [Power(0.03, 4.0, 2.0), Power(0.05, 0.5, 1.3)])
def test_power_costs_give_their_constants_back(formula):
    found = Power.fitted(costing(formula))
    assert (found.c, found.d, found.p) == pytest.approx(
        (formula.c, formula.d, formula.p), rel=1e-3
    )


def test_no_constant_is_negative_even_where_longer_windows_cost_less():
    settings = [setting(s, 1, 0.5, 0.1 / s) for s in (1, 2, 4, 8)]
    linear, power = Linear.fitted(settings), Power.fitted(settings)
    assert linear.a == 0
    assert linear.b > 0
    assert min(power.c, power.d, power.p) >= 0
    free = [setting(s, 1, 0.5, -0.01) for s in (1, 2, 4)]
    assert Linear.fitted(free) == Linear(0, 0)
    assert Power.fitted(free).c == 0


def study_rows():
    rows = [
        on_device(steps, 2.0 * (1 + 0.1 * math.log(400 / steps)) + seed, seed=seed)
        for seed in (0, 1)
        for steps in (400, 200, 300)
    ]
    # Seed 1's losses lie 1 higher, the device's and the offloaded one's alike.
    rows += [row(400, 2.1, update_interval=8), row(400, 3.0, seed=1, update_interval=8)]
    return [*rows, row(400, 2.4, update_interval=8, rolling=False)]


def test_a_run_is_compared_with_the_whole_run_on_the_device_of_its_own_seed_and_rate():
    rolling, aligned = fit(study_rows())["settings"]
    assert rolling["excess"] == pytest.approx((2.1 / 2 - 1) / 2)
    assert rolling["seeds"] == [0, 1]
    assert rolling["rho"] == pytest.approx(0.75)
    assert rolling["efficiencies"][1] == pytest.approx(1)
    assert aligned["excess"] == pytest.approx(0.2)
    other_rate = [dict(r, lr=3e-4, eval_loss=5 * r["eval_loss"]) for r in study_rows()]
    both = fit(study_rows() + other_rate)
    assert both["settings"][0] == pytest.approx(rolling)
    assert both["fits"]["0.001"] == fit(study_rows())["fits"]["0.001"]


def test_constants_come_from_rolling_windows_and_the_default_selection_alone():
    alone = study_rows()[:-1]
    others = [
        row(400, 2.9, update_interval=8, rolling=False),
        row(400, 2.9, update_interval=8, select_interval=25),
    ]
    assert fit(alone + others)["fits"] == fit(alone)["fits"]
    assert fit([*alone, row(400, 2.9, update_interval=16)])["fits"] != fit(alone)["fits"]


def test_runs_differ_in_nothing_but_what_is_studied(tmp_path):
    parts = settings_by_part(tmp_path / "model", None)
    tasks = tasks_of(parts, tmp_path, (3e-4, 1e-3), (0, 1))
    assert len({task.folder for task in tasks}) == len(tasks)
    left = [task.settings.to_dict() for task in tasks]
    for settings in left:
        for varied in ("strategy", "knobs", "lr", "seed", "steps"):
            del settings[varied]
    assert all(settings == left[0] for settings in left)
    offloaded = [task for task in tasks if task.settings.strategy == "zenflow"]
    assert {task.settings.steps for task in offloaded} == {400}


def test_the_study_runs_whole_and_records_what_is_finished(tmp_path, monkeypatch):
    monkeypatch.setattr(staleness, "SHARES", ((1.0, 0.5), (0.75,)))
    monkeypatch.setattr(staleness, "_windows", lambda: [{"update_interval": 2}])
    monkeypatch.setattr(staleness, "_others", lambda: [{"rolling": False}])
    flags = ["--steps", "4", "--rates", "1e-3", "--runs", str(tmp_path / "runs")]
    result = CliRunner().invoke(main, [*flags, "--seeds", "0", "--out", str(tmp_path / "record")])
    assert result.exit_code == 0, result.output
    lines = (tmp_path / "record/record.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [r["steps"] for r in rows] == [4, 2, 4, 3, 4]
    assert (tmp_path / "record/efficiency.png").read_bytes().startswith(b"\x89PNG")
    assert "| S | lag |" in (tmp_path / "record/README.md").read_text()
    assert json.loads((tmp_path / "record/fit.json").read_text()) == pytest.approx(fit(rows))
    finished = [*flags, "--seeds", "0,1", "--finished", "--out", str(tmp_path / "again")]
    again = CliRunner().invoke(main, finished)
    assert again.exit_code == 0, again.output
    assert (tmp_path / "again/record.jsonl").read_text().splitlines() == lines


@pytest.mark.parametrize("folder", RECORDS, ids=lambda folder: folder.name)
def test_recorded_constants_follow_from_the_recorded_runs(folder):
    lines = (folder / "record.jsonl").read_text().splitlines()
    found = fit([json.loads(line) for line in lines])
    recorded = json.loads((folder / "fit.json").read_text())
    assert recorded["exchange"] == {k: pytest.approx(v) for k, v in found["exchange"].items()}
    assert recorded["fits"] == {
        group: {name: pytest.approx(constants, rel=1e-6) for name, constants in fits.items()}
        for group, fits in found["fits"].items()
    }
    assert len(recorded["settings"]) == len(found["settings"])
    for mine, theirs in zip(found["settings"], recorded["settings"], strict=True):
        assert theirs["knobs"] == mine["knobs"]
        assert theirs["efficiencies"] == pytest.approx(mine["efficiencies"])
        assert theirs["residuals"] == pytest.approx(mine["residuals"], abs=1e-9)
