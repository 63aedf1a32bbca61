"""Twin: the simulator, with a constant for each lane."""

from dataclasses import replace

import pytest

from autotune.model.twin import NEUTRAL, PARTS, Twin
from sim.simulate import Strategy, simulate
from sim.timing.costs import costs_of
from tests.autotune.worlds import CONFIG, HERE, knobs_at, machine, twin, workload
from zenflow.errors import ConfigError


def test_with_neutral_constants_it_is_the_simulator():
    knobs = knobs_at(update_interval=2, topk_ratio=0.2)
    config = replace(knobs.applied_to(CONFIG), select_interval=0)
    costs = costs_of(workload(), machine())
    done = simulate(costs, Strategy(name="zenflow", config=config), num_steps=2)
    found = twin().forecast(knobs)
    assert found.step_seconds == pytest.approx(done.step_seconds)
    assert found.stall_seconds == pytest.approx(done.stall_seconds)
    together = found.busy_seconds["device"] + found.busy_seconds["step"]
    assert {**found.busy_seconds, "device": together} == pytest.approx(
        {**done.busy_seconds, "step": done.update_seconds}
    )
    assert 0 < done.update_seconds < 0.5 * done.busy_seconds["device"]


ON_CPU = [part for part in PARTS if part != "launch"]


@pytest.mark.parametrize("lane", ON_CPU)
def test_a_lanes_constant_scales_what_that_lane_takes_and_no_other(lane):
    """But for what has no rate, and for cores that the host and a CPU as device share."""
    found = machine()
    columns = replace(found.overheads.device_update, value=1e7)
    found = replace(found, overheads=replace(found.overheads, column_update=columns))
    model = Twin(workload(), found, CONFIG)
    before = model.forecast(HERE).busy_seconds
    after = model.forecast(HERE, {**NEUTRAL, lane: 1.5}).busy_seconds
    for other in ON_CPU:
        factor, spread = (1.5, 0.1) if other == lane else (1.0, 0.2)
        assert after[other] / before[other] == pytest.approx(factor, rel=spread), other


def test_selections_are_counted_apart():
    model = twin()
    rarely, often = knobs_at(select_interval=400), knobs_at(select_interval=5)
    assert model.forecast(rarely) == model.forecast(often)
    assert model.num_simulated == 1
    assert model.selection_seconds(rarely) == model.selection_seconds(often) > 0


def test_what_was_simulated_is_known_and_constants_make_another():
    model = twin()
    first = model.forecast(HERE)
    assert model.forecast(HERE) is first
    assert model.forecast(HERE, {**NEUTRAL, "d2h": 2.0}).step_seconds > first.step_seconds
    assert model.num_simulated == 2


def test_warm_up_is_not_what_a_steady_state_has():
    warming = Twin(workload(), machine(), replace(CONFIG, full_warm_up_rounds=50))
    assert warming.forecast(HERE) == Twin(workload(), machine(), CONFIG).forecast(HERE)


def test_gradients_that_stay_until_the_step_leave_later():
    keeping = Twin(workload(), machine(), CONFIG, releases=False)
    assert keeping.forecast(HERE).step_seconds > twin().forecast(HERE).step_seconds


def test_knobs_that_break_a_rule_are_refused():
    with pytest.raises(ConfigError, match="update_interval"):
        twin().forecast(knobs_at(update_interval=0))


def test_what_no_knob_changes_is_the_configurations():
    one_by_one = Twin(workload(), machine(), replace(CONFIG, queue_depth=1))
    mine, its = twin().forecast(HERE), one_by_one.forecast(HERE)
    assert its.busy_seconds["host"] > mine.busy_seconds["host"]
