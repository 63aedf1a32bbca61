"""The study of what late updates cost: its arithmetic, and the constants that follow from it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.efficiency import FITTED
from experiments.lab.finding import Verdict
from experiments.lab.record import needed
from experiments.lab.study import Scope
from experiments.studies.staleness.fit import Exchange, fit
from experiments.studies.staleness.formulas import Linear, Measured, Power, residuals, stretch_of
from experiments.studies.staleness.study import STUDY
from zenflow.config import ZenFlowConfig
from zenflow.errors import ConfigError


def costing(formula):
    """Return settings that cost exactly what the formula says."""
    return [
        Measured(interval, lag, rho, formula.cost(interval, lag, rho))
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


@pytest.mark.parametrize("shape", [(4.0, 2.0), (0.5, 1.3)])
def test_power_costs_give_their_constants_back_with_one_shape_for_all(shape):
    low, high = Power(0.0004, *shape), Power(0.002, *shape)
    for formula, found in zip(
        (low, high), Power.fitted([costing(low), costing(high)]), strict=True
    ):
        assert (found.c, found.d, found.p) == pytest.approx((formula.c, *shape), rel=1e-3)


def test_what_windows_that_end_together_count_is_found_whatever_the_rate():
    formulas = [Power(0.0004, 4.0, 2.0), Power(0.002, 4.0, 2.0)]
    measured = [
        [Measured(s, lag, 0.7, f.cost(s, lag, 0.7, 2.5)) for s, lag in ((4, 1), (4, 4), (8, 1))]
        for f in formulas
    ]
    assert stretch_of(formulas, measured) == pytest.approx(2.5, rel=1e-3)
    assert stretch_of(formulas, [measured[0], []]) == pytest.approx(2.5, rel=1e-3)


def test_no_constant_is_negative_even_where_longer_windows_cost_less():
    settings = [Measured(s, 1, 0.5, 0.1 / s) for s in (1, 2, 4, 8)]
    linear, power = Linear.fitted(settings), Power.fitted([settings])[0]
    assert linear.a == 0
    assert linear.b > 0
    assert min(power.c, power.d, power.p) >= 0
    free = [Measured(s, 1, 0.5, -0.01) for s in (1, 2, 4)]
    assert Linear.fitted(free) == Linear(0, 0)
    assert Power.fitted([free])[0].c == 0


def test_constants_have_the_least_squared_residuals():
    found = (1, 1, 0.02), (4, 1, 0.05), (4, 4, 0.2), (16, 1, 0.4), (16, 8, 0.9)
    settings = [Measured(interval, lag, 0.7, cost) for interval, lag, cost in found]

    def error(formula):
        return sum(left**2 for left in residuals(formula, settings))

    best = Linear.fitted(settings)
    power = Power.fitted([settings])[0]
    for step in (0.99, 1.01):
        assert error(Linear(best.a * step, best.b)) > error(best)
        assert error(Linear(best.a, best.b * step)) > error(best)
        assert error(Power(power.c * step, power.d, power.p)) > error(power)
        assert error(Power(power.c, power.d, power.p * step)) > error(power)


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
    assert rolling["seeds"] == (0, 1)
    assert rolling["rho"] == pytest.approx(0.75)
    assert rolling["efficiencies"][1] == pytest.approx(1)
    assert aligned["excess"] == pytest.approx(0.2)
    other_rate = [dict(r, lr=3e-4, eval_loss=5 * r["eval_loss"]) for r in study_rows()]
    both = fit(study_rows() + other_rate)
    assert both["settings"][0] == rolling
    assert both["fits"]["0.001"]["linear"] == fit(study_rows())["fits"]["0.001"]["linear"]
    assert both["chosen"]["lr"] == 1e-3


def test_constants_come_from_rolling_windows_and_the_default_selection_alone():
    alone = study_rows()[:-1]
    others = [
        row(400, 2.08, update_interval=8, rolling=False),
        row(400, 2.05, update_interval=8, select_interval=25),
    ]
    assert fit(alone + others)["fits"] == fit(alone)["fits"]
    assert fit(alone)["chosen"]["aligned_stretch"] is None
    assert fit(alone + others[:1])["chosen"]["aligned_stretch"] > 1
    assert fit(alone + others[1:])["chosen"]["aligned_stretch"] is None
    rolling = row(400, 2.04, update_interval=16)
    assert fit([*alone, rolling])["fits"] != fit(alone)["fits"]
    rolling["eval_loss"] = 2.9
    assert fit([*alone, rolling])["fits"] == fit(alone)["fits"], "too costly to be fitted"


def test_missing_runs_are_named():
    with pytest.raises(ConfigError, match=r"learning rate 0\.001 none was trained"):
        fit([r for r in study_rows() if r["config"]["topk_ratio"] == 1])


def test_runs_differ_in_nothing_but_what_is_studied():
    cells = STUDY.cells(Scope(seeds=(0, 1)))
    assert len({cell.key for cell in cells}) == len(cells)
    left = [cell.work.to_dict() for cell in cells]
    for settings in left:
        for varied in ("strategy", "knobs", "lr", "seed", "steps"):
            del settings[varied]
    assert all(settings == left[0] for settings in left)
    assert {c.work.steps for c in cells if c.work.strategy == "zenflow"} == {400}


def test_the_tuner_counts_delays_as_the_newest_record_has_them():
    findings = needed("staleness").findings
    assert len(findings) == 4
    assert all(finding.verdict is Verdict.HOLDS for finding in findings)
    assert findings[0].published == FITTED.scale
