"""Refit: hidden constants are found from what lanes were busy with."""

import math
import random
from dataclasses import replace

import pytest

from autotune.model.refit import Prior, refit
from autotune.model.twin import NEUTRAL, PARTS
from tests.autotune.worlds import HERE, Truth, knobs_at, log_gap, twin

TABLE = Prior(NEUTRAL, 0.35)
GENERIC = Prior(NEUTRAL, 1.0)


@pytest.mark.parametrize("seed", range(5))
def test_one_stretch_makes_the_forecast_tell_what_the_lanes_do(seed):
    draw = random.Random(seed)
    truth = Truth(**{lane: math.exp(draw.gauss(0.0, 0.5)) for lane in PARTS})
    stretch = truth.stretch(0, HERE)
    model = twin()
    constants = refit(model, [stretch], GENERIC)
    told, before = model.forecast(HERE, constants), model.forecast(HERE)
    for lane, measured in stretch.busy_seconds.items():
        if measured < 0.02 * stretch.step_seconds:
            continue  # too little to tell by
        assert log_gap(told.busy_seconds[lane], measured) < 0.03, lane
    assert (
        max(log_gap(before.busy_seconds[lane], s) for lane, s in stretch.busy_seconds.items())
        > 0.2
    )
    assert log_gap(told.step_seconds, stretch.step_seconds) < 0.03


def test_what_was_learnt_at_one_setting_holds_at_another():
    truth = Truth(device=1.3, d2h=0.6, h2d=1.8, host=1.5)
    model = twin()
    constants = refit(model, [truth.stretch(0, HERE)], GENERIC)
    for knobs in (knobs_at(update_interval=1), knobs_at(topk_ratio=0.3, update_interval=8)):
        step = model.forecast(knobs, constants).step_seconds
        assert log_gap(step, truth.forecast(knobs).step_seconds) < 0.05


def slowed(stretch, factor):
    busy = {lane: factor * seconds for lane, seconds in stretch.busy_seconds.items()}
    return replace(stretch, busy_seconds=busy, step_seconds=factor * stretch.step_seconds)


def test_one_stretch_in_which_all_took_ten_times_as_long_moves_next_to_nothing():
    truth = Truth(d2h=1.4, h2d=0.7, host=1.2)
    usual = [truth.stretch(index, HERE) for index in range(5)]
    odd = [*usual[:4], slowed(truth.stretch(4, HERE), 10.0)]
    expected = refit(twin(), usual, TABLE)
    found = refit(twin(), odd, TABLE)
    for lane in PARTS:
        assert log_gap(found[lane], expected[lane]) < 0.03, lane


def test_without_evidence_the_belief_stands():
    centre = {"device": 1.1, "step": 1.4, "launch": 0.9, "d2h": 0.8, "h2d": 2.0, "host": 0.5}
    blind = replace(Truth(host=3.0).stretch(0, HERE), busy_seconds={})
    for stretches in ([], [blind]):
        assert refit(twin(), stretches, Prior(centre, 0.35)) == pytest.approx(centre)


def test_a_lane_that_hardly_works_keeps_its_belief():
    stretch = Truth(h2d=3.0).stretch(0, HERE)
    busy = {**stretch.busy_seconds, "h2d": 0.01 * stretch.step_seconds}
    found = refit(twin(), [replace(stretch, busy_seconds=busy)], TABLE)
    assert found["h2d"] == pytest.approx(1.0)


@pytest.mark.parametrize("factor", [1.5, 0.6])
def test_old_stretches_fade_after_a_drift(factor):
    before, after = Truth(d2h=1.0), Truth(d2h=factor)

    def found(later):
        stretches = [before.stretch(index, HERE) for index in range(6)]
        stretches += [after.stretch(6 + index, HERE) for index in range(later)]
        return refit(twin(), stretches, TABLE)["d2h"]

    assert log_gap(found(0), 1.0) < 0.02
    assert log_gap(found(5), factor) < 0.03, "fewer than there are old ones, but they weigh more"


def test_a_firm_belief_moves_less_than_a_loose_one():
    stretch = Truth(d2h=2.0).stretch(0, HERE)
    firm = refit(twin(), [stretch], Prior(NEUTRAL, 0.02))["d2h"]
    loose = refit(twin(), [stretch], Prior(NEUTRAL, 1.0))["d2h"]
    assert 1.0 < firm < 0.9 * loose
    assert log_gap(loose, 2.0) < 0.02


def test_only_the_settings_measured_last_count():
    """A machine's constants may differ with the load; those nearest to the present matter."""
    odd = slowed(Truth().stretch(0, knobs_at(update_interval=8)), 3.0)
    recent = [
        Truth().stretch(1 + i, knobs_at(topk_ratio=0.1, update_interval=s))
        for i, s in enumerate((1, 2, 4))
    ]
    with_odd, without = refit(twin(), [odd, *recent], TABLE), refit(twin(), recent, TABLE)
    assert with_odd == without


def test_the_devices_own_step_is_told_from_forward_and_backward():
    """So that what a larger share of columns costs is known before it is tried."""
    larger = knobs_at(topk_ratio=0.3)
    truth = Truth(step=20.0)
    model = twin()
    constants = refit(model, [truth.stretch(0, HERE)], Prior(NEUTRAL, 2.0))
    assert log_gap(constants["device"], 1.0) < 0.05
    told, expected = model.forecast(larger, constants), truth.forecast(larger)
    assert log_gap(told.busy_seconds["step"], expected.busy_seconds["step"]) < 0.03
    assert expected.busy_seconds["step"] > 10 * model.forecast(larger).busy_seconds["step"]
