"""Efficiency: what deferring costs, and the curve that says how much is deferred."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.efficiency import FITTED, DelayCost, EnergyCurve
from zenflow.config import ZenFlowConfig
from zenflow.errors import ConfigError
from zenflow.knobs import Knobs

START = Knobs.of(ZenFlowConfig())

costs = st.builds(
    DelayCost,
    interval=st.floats(10, 200),
    power=st.floats(0.5, 4),
    rate_power=st.floats(0.5, 4),
) | st.just(FITTED)
shares = st.floats(0.0, 1.0)
rates = st.floats(0.1, 4.0)
settings_of_windows = st.builds(
    lambda interval: replace(START, update_interval=interval), st.integers(1, 64)
)


@given(settings_of_windows, shares, rates, costs)
def test_an_efficiency_is_a_share_and_one_where_nothing_is_deferred(knobs, rho, rate, cost):
    assert 0 < cost.of(knobs, rho, rate) <= 1
    assert cost.of(knobs, 0.0, rate) == 1


@given(settings_of_windows, st.floats(0.01, 0.99), rates, costs)
def test_longer_windows_more_deferred_energy_and_higher_rates_are_worth_less(
    knobs, rho, rate, cost
):
    def lost(interval, rho, rate):
        return 1 / cost.of(replace(knobs, update_interval=interval), rho, rate) - 1

    interval = knobs.update_interval
    assert lost(interval + 1, rho, rate) >= lost(interval, rho, rate)
    assert lost(interval, rho + 0.01, rate) >= lost(interval, rho, rate)
    assert lost(interval, rho, 1.1 * rate) >= lost(interval, rho, rate)


def test_the_formula_is_what_it_says():
    cost = DelayCost(interval=8.0, power=2.0, rate_power=3.0)
    knobs = replace(START, update_interval=16)
    assert cost.of(knobs, 0.5) == pytest.approx(1 / (1 + 0.5 * 4))
    assert cost.of(knobs, 0.5, rate=0.5) == pytest.approx(1 / (1 + 0.5 * 4 / 8))


def test_short_windows_cost_next_to_nothing_at_the_best_rate():
    assert FITTED.of(replace(START, update_interval=16), 1.0) > 0.98
    assert FITTED.of(replace(START, update_interval=64), 1.0) < 0.96


@pytest.mark.parametrize("rho", [-0.1, 1.1, float("nan")])
def test_what_is_no_share_is_refused(rho):
    with pytest.raises(ConfigError, match=r"share of energy in \[0, 1\]"):
        FITTED.of(START, rho)


@st.composite
def curves(draw, inner=False):
    """Return measured points: ratios inside (0, 1), shares that ascend with them."""
    ratios = draw(st.lists(st.floats(0.001, 0.999), min_size=1, max_size=8, unique=True))
    span = st.floats(0.001, 0.999) if inner else shares
    found = draw(st.lists(span, min_size=len(ratios), max_size=len(ratios)))
    return dict(zip(sorted(ratios), sorted(found), strict=True))


@given(curves(), shares)
def test_a_curve_passes_what_was_measured_and_is_straight_in_between(measured, position):
    curve = EnergyCurve.of(measured)
    points = [(0.0, 0.0), *measured.items(), (1.0, 1.0)]
    for ratio, share in points:
        assert curve.captured(ratio) == pytest.approx(share, abs=1e-12)
    for (low, below), (high, above) in pairwise(points):
        between = min(high, low + position * (high - low))
        line = below + (above - below) * (between - low) / (high - low)
        assert curve.captured(between) == pytest.approx(line, abs=1e-9)


@given(curves(), st.lists(shares, min_size=2, max_size=10))
def test_more_columns_capture_no_less(measured, ratios):
    curve = EnergyCurve.of(measured)
    found = [curve.captured(ratio) for ratio in sorted(ratios)]
    assert all(later >= earlier - 1e-12 for earlier, later in pairwise(found))


@given(curves(inner=True), st.floats(0.001, 0.999), st.floats(0.001, 0.999))
def test_a_bent_curve_passes_its_point_ascends_and_keeps_its_ends(measured, ratio, captured):
    curve = EnergyCurve.of(measured).through(ratio, captured)
    assert curve.captured(ratio) == pytest.approx(captured, rel=1e-6)
    assert (curve.captured(0.0), curve.captured(1.0)) == (0.0, pytest.approx(1.0))
    found = [curve.captured(i / 50) for i in range(51)]
    assert all(later >= earlier - 1e-12 for earlier, later in pairwise(found))
    assert {*measured} <= {point for point, _ in curve.points}


@given(curves(inner=True), st.floats(0.001, 0.999), st.floats(0.002, 0.99))
def test_bending_moves_every_ratio_the_same_way(measured, ratio, captured):
    curve = EnergyCurve.of(measured)
    bent = curve.through(ratio, captured)
    sign = captured - curve.captured(ratio)
    for other in measured:
        assert (bent.captured(other) - curve.captured(other)) * sign >= -1e-9


@pytest.mark.parametrize(("ratio", "captured"), [(0.0, 0.5), (1.0, 0.5), (0.1, 0.0), (0.1, 1.0)])
def test_a_point_without_odds_bends_nothing(ratio, captured):
    curve = EnergyCurve.default()
    assert curve.through(ratio, captured) is curve


@pytest.mark.parametrize("measured", [{0.1: 0.5, 0.2: 0.4}, {1.5: 0.5}, {0.1: -0.1}, {0.5: 1.2}])
def test_points_that_make_no_curve_are_refused(measured):
    with pytest.raises(ConfigError, match="ascending shares"):
        EnergyCurve.of(measured)


@pytest.mark.parametrize("ratio", [-0.1, 1.1])
def test_a_ratio_off_the_curve_is_refused(ratio):
    with pytest.raises(ConfigError, match="topk_ratio is a share"):
        EnergyCurve.default().captured(ratio)
