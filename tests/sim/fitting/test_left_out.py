"""The term for what the model leaves out: as wide as measurements need, and no wider."""

import math
from dataclasses import replace

import numpy as np
import pytest

from sim.fitting.left_out import (
    CALIBRATED,
    COVERAGE,
    TABLE,
    Outcome,
    fit_left_out,
    held_out,
    left_out_of,
)
from sim.hardware.catalog import find_machine
from zenflow.errors import ConfigError

REACH = 1.2815515655446004
"""Standard deviations within which 80 % of a normal distribution lie."""


def outcome(off, spread=0.0):
    """Return a measurement off by so much, as a logarithm, from a range of this spread."""
    reach = REACH * max(spread, 1e-12)
    return Outcome(measured=math.exp(off), low=math.exp(-reach), high=math.exp(reach))


def test_a_range_that_holds_its_measurement_needs_nothing_more():
    assert outcome(0.1, spread=0.1).needed == 0.0
    assert outcome(-0.12, spread=0.1).needed == 0.0
    # Spreads add up as squares do.
    assert outcome(REACH * 0.5, spread=0.3).needed == pytest.approx(0.4)


def test_the_spread_of_what_was_left_out_is_found_again():
    off = np.random.default_rng(0).normal(0.0, 0.2, 4000)
    assert fit_left_out([outcome(each) for each in off]) == pytest.approx(0.2, rel=0.05)


def test_ranges_then_hold_the_wanted_share_of_measurements_and_one_fewer_is_too_few():
    found = [outcome(0.1 * index, spread=0.05) for index in range(10)]
    term = fit_left_out(found)
    assert sum(each.needed <= term for each in found) == COVERAGE * 10
    assert sum(each.needed < term for each in found) == COVERAGE * 10 - 1


def test_a_part_that_is_left_out_has_no_say():
    near, far = [outcome(0.1)] * 5, [outcome(3.0)] * 5
    assert held_out([near, far]) == [5, 0]
    assert held_out([near, near, far]) == [5, 5, 0]


def test_a_calibrated_machine_leaves_less_out():
    machine = find_machine("hgx-h100")
    assert left_out_of(machine) == TABLE
    assert left_out_of(replace(machine, metadata={"calibration": {}})) == CALIBRATED < TABLE


def test_nothing_measured_is_nothing_to_fit():
    with pytest.raises(ConfigError, match="at least one measurement"):
        fit_left_out([])
