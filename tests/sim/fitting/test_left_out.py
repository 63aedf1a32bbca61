"""The term for what the model leaves out: as wide as measurements need, and no wider."""

import math
from dataclasses import replace

import numpy as np
import pytest

from sim.fitting.left_out import (
    BY_REGIME,
    CALIBRATED,
    COVERAGE,
    TABLE,
    LeftOut,
    Outcome,
    fit_left_out,
    fit_sides,
    held_out,
    left_out_in,
    left_out_of,
)
from sim.fitting.regimes import regime_of
from sim.fitting.uncertainty import interval_of
from sim.hardware.catalog import find_machine
from sim.models.workload import Workload
from sim.simulate import Strategy
from sim.timing.costs import costs_of
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


@pytest.mark.parametrize("fit", [fit_left_out, fit_sides])
def test_nothing_measured_is_nothing_to_fit(fit):
    with pytest.raises(ConfigError, match="at least one measurement"):
        fit([])


def test_measurements_that_are_slower_alone_widen_the_slow_side_alone():
    slow = [outcome(0.1 * index, spread=0.05) for index in range(10)]
    found = fit_sides([slow])
    assert found.fast == 0.0
    # One in ten lies beyond either end.
    assert sum(each.is_held(found) for each in slow) == 9
    assert sum(each.needed < found.slow for each in slow) == 8
    fast = fit_sides([[outcome(-0.1 * index, spread=0.05) for index in range(10)]])
    assert (fast.fast, fast.slow) == pytest.approx((found.slow, 0.0))


def test_sources_count_alike_however_many_measurements_each_has():
    near, far = outcome(0.05), outcome(1.0)
    # A fifth of the sources is far off, beside a tenth that may lie beyond.
    assert fit_sides([*[[near] * 30] * 8, [far], [far]]).slow == far.needed
    # A twentieth, even with most of the measurements.
    assert fit_sides([*[[near]] * 19, [far] * 100]).slow == near.needed
    # Halves of a source count for half.
    assert fit_sides([*[[near]] * 8, [near, far], [near, far]]).slow == near.needed


def test_measurements_count_alike_where_one_source_would_decide_alone():
    near, far = outcome(0.05), outcome(1.0)
    assert fit_sides([[near] * 30, [near], [near], [near], [far]]).slow == near.needed
    assert fit_sides([[near] * 3, [near], [near], [near], [far]]).slow == far.needed


def test_a_skewed_term_moves_the_slow_end_and_neither_the_median_nor_the_fast_end():
    machine = find_machine("hgx-h100", 1)

    def constant(_):
        return 2.0

    found = interval_of(machine, constant, count=3, left_out=LeftOut(fast=0.0, slow=0.5))
    assert (found.low, found.median) == pytest.approx((2.0, 2.0))
    assert found.high == pytest.approx(2.0 * math.exp(0.5 * REACH), rel=0.05)
    with pytest.raises(ConfigError, match="at least 0 on both sides"):
        LeftOut(fast=-0.1, slow=0.5)


TINY = {
    "model_type": "llama", "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 4, "num_attention_heads": 4,
}  # fmt: skip


def costs(batch, *, devices=1, hosts=1, hidden=256):
    model = {**TINY, "hidden_size": hidden, "intermediate_size": 2 * hidden}
    workload = Workload.of_config("tiny", model, batch_size=batch, sequence=512)
    return costs_of(workload, find_machine("hgx-h100", devices, num_hosts=hosts))


@pytest.mark.parametrize(
    ("strategy", "batch", "places", "regime"),
    [
        ("ddp", 1, {}, "launch-bound"),
        ("ddp", 64, {"hidden": 4096}, "device alone"),
        ("ddp", 64, {"hidden": 4096, "devices": 8}, "devices, no offload"),
        ("ddp", 64, {"hidden": 4096, "devices": 8, "hosts": 2}, "several hosts"),
        ("deepspeed_zero_offload", 1, {}, "offload"),
        ("zero3_offload", 64, {"hidden": 4096, "devices": 8, "hosts": 2}, "offload"),
    ],
)
def test_the_kind_of_a_run_says_what_bounds_it_and_how_wide_its_range_is(
    strategy, batch, places, regime
):
    chosen, step = Strategy.of(strategy), costs(batch, **places)
    assert regime_of(step, chosen) == regime
    assert left_out_in(chosen, step) == BY_REGIME[regime]


def test_the_engines_own_steps_and_calibrated_machines_are_off_either_way():
    step = costs(1)
    assert left_out_in(Strategy.of("zero_offload"), step) == LeftOut(TABLE, TABLE)
    machine = replace(step.hardware, metadata={"calibration": {}})
    step = costs_of(step.workload, machine)
    assert left_out_in(Strategy.of("ddp"), step) == LeftOut(CALIBRATED, CALIBRATED)
