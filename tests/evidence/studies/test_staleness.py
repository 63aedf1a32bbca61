"""The study of what late updates cost: its arithmetic, and the constants that follow from it."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.efficiency import FITTED, DelayCost
from evidence.studies.staleness.fit import Exchange, fit
from evidence.studies.staleness.formulas import Measured, fitted, residuals
from evidence.studies.staleness.study import STUDY
from experiments.lab.finding import Verdict
from experiments.lab.study import Scope, as_json
from zenflow.config import ZenFlowConfig
from zenflow.errors import ConfigError


def costing(formula):
    """Return settings that cost exactly what the formula says."""
    return [
        Measured(interval, rate, rho, rho * formula.cost(interval, rate))
        for interval in (4, 16, 32, 64)
        for rate in (0.4, 1.0, 2.0)
        for rho in (0.4, 0.8)
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


@pytest.mark.parametrize("constants", [(80.0, 3.0, 2.0), (20.0, 1.3, 0.6)])
def test_costs_give_their_constants_back(constants):
    names = ("interval", "power", "rate_power")
    found = fitted(costing(DelayCost(**dict(zip(names, constants, strict=True)))))
    assert (found.interval, found.power, found.rate_power) == pytest.approx(constants, rel=1e-3)


def test_where_nothing_costs_anything_the_interval_is_endless():
    found = fitted([Measured(s, 1.0, 0.5, -0.01) for s in (4, 16, 64)])
    assert found.interval == math.inf
    assert found.cost(64) == 0


def test_constants_have_the_least_squared_residuals():
    places = ((4, 1.0, 0.0), (16, 1.0, 0.02), (64, 1.0, 0.3), (16, 2.0, 0.1), (64, 2.0, 0.9))
    settings = [Measured(interval, rate, 0.7, cost) for interval, rate, cost in places]

    def error(formula):
        return sum(left**2 for left in residuals(formula, settings))

    best = fitted(settings)
    for name in ("interval", "power", "rate_power"):
        for step in (0.99, 1.01):
            assert error(replace(best, **{name: getattr(best, name) * step})) > error(best)


def study_rows():
    rows = [
        on_device(steps, 2.0 * (1 + 0.1 * math.log(400 / steps)) + seed, seed=seed)
        for seed in (0, 1)
        for steps in (400, 200, 300)
    ]
    # Seed 1's losses lie 1 higher, the device's and the offloaded one's alike.
    rows += [row(400, 2.1, update_interval=8), row(400, 3.0, seed=1, update_interval=8)]
    return [*rows, row(400, 2.05, update_interval=32)]


def test_a_run_is_compared_with_the_whole_run_on_the_device_of_its_own_seed_and_rate():
    short, long = fit(study_rows())["settings"]
    assert short["excess"] == pytest.approx((2.1 / 2 - 1) / 2)
    assert short["seeds"] == (0, 1)
    assert short["rho"] == pytest.approx(0.75)
    assert short["efficiencies"][1] == pytest.approx(1)
    assert long["excess"] == pytest.approx(0.025)
    other_rate = [dict(r, lr=3e-4, eval_loss=5 * r["eval_loss"]) for r in study_rows()]
    both = fit(study_rows() + other_rate)
    assert both["settings"][0]["excess"] == short["excess"]
    assert both["fit"]["best_lr"] == 1e-3


def test_what_is_too_costly_is_not_fitted():
    known = fit(study_rows())["fit"]
    other = row(400, 2.04, update_interval=16)
    assert fit([*study_rows(), other])["fit"] != known
    assert fit([*study_rows(), {**other, "eval_loss": 2.9}])["fit"] == known


def test_a_rate_without_runs_on_the_device_is_left_out():
    assert fit([*study_rows(), row(400, 2.0, lr=3e-4)]) == fit(study_rows())


def test_missing_runs_are_named():
    with pytest.raises(ConfigError, match="none was trained"):
        fit([r for r in study_rows() if r["config"]["topk_ratio"] == 1])


def test_runs_differ_in_nothing_but_what_is_studied():
    cells = STUDY.cells(Scope(seeds=(0, 1)))
    assert len({cell.key for cell in cells}) == len(cells)
    left = [cell.work.to_dict() for cell in cells]
    for settings in left:
        for varied in ("strategy", "knobs", "lr", "seed", "steps"):
            del settings[varied]
    assert all(settings == left[0] for settings in left)
    assert {c.work.steps for c in cells if c.work.strategy == "zenflow"} == {800}


def test_a_record_says_whether_the_tuner_counts_delays_as_it_has_them():
    data = {"fit": {"interval": FITTED.interval, "power": 1.0, "rate_power": FITTED.rate_power}}
    verdicts = [finding.verdict for finding in STUDY.findings(data)]
    assert verdicts == [Verdict.HOLDS, Verdict.FAILS, Verdict.HOLDS]


def test_the_picture_and_the_page_stand_without_any_cost():
    found = fit([r for r in study_rows() if r["config"]["update_interval"] != 8 or r["seed"] == 1])
    data = as_json({**found, "shorter": []})
    STUDY.draw(data)
    assert "rho" in STUDY.about(data)
