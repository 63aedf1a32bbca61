"""What a prediction says: steady states, selections, names."""

from dataclasses import replace

import pytest

from sim.simulate import STRATEGIES, Strategy, simulate
from sim.timing.phases import costs_of_phases
from zenflow.errors import ConfigError


def costs(**times):
    given = {"forward": 1.0, "backward": 2.0, "d2h": 1.0, "update": 1.0, "h2d": 0.5}
    return costs_of_phases(**{**given, **times}, num_params=100_000_000, num_layers=16)


def test_a_lane_that_falls_behind_is_waited_for_in_the_end():
    # Copies take 3.15 s of a 3 s step. With a lag of 4 nothing waits for them at first: 12 s have
    # to pile up, in 80 steps.
    slow = costs(d2h=3.5)
    strategy = Strategy.of("zenflow_paper", update_interval=4, select_interval=0)
    found = simulate(slow, strategy)
    assert found.step_seconds == pytest.approx(3.15, rel=0.002)
    assert max(found.busy_seconds.values()) <= found.step_seconds * 1.001
    early = simulate(slow, Strategy.of("zenflow", update_interval=8, select_interval=0))
    assert early.step_seconds == pytest.approx(3.15, rel=0.002)


def test_more_measured_steps_say_the_same():
    strategy = Strategy.of("zenflow", select_interval=50)
    few, many = (simulate(costs(), strategy, num_steps=n) for n in (4, 64))
    assert few.step_seconds == pytest.approx(many.step_seconds, rel=1e-6)
    assert few.selection_seconds == pytest.approx(many.selection_seconds, rel=1e-6)


def test_a_selection_costs_in_proportion_to_how_often_it_is_made():
    never, rarely, often = (
        simulate(costs(), Strategy.of("zenflow", select_interval=n)) for n in (0, 100, 20)
    )
    assert never.selection_seconds == 0
    assert rarely.selection_seconds > 0
    assert often.selection_seconds == pytest.approx(5 * rarely.selection_seconds)
    assert often.step_seconds - never.step_seconds == pytest.approx(often.selection_seconds)
    assert often.stall_seconds - never.stall_seconds == pytest.approx(often.selection_seconds)


def test_warm_up_rounds_are_not_measured():
    plain = simulate(costs(), Strategy.of("zenflow", select_interval=0))
    warmed = simulate(costs(), Strategy.of("zenflow", select_interval=0, full_warm_up_rounds=5))
    assert warmed.step_seconds == pytest.approx(plain.step_seconds, rel=1e-3)


def test_without_spans_the_figures_are_the_same():
    strategy = Strategy.of("zenflow")
    full, bare = (simulate(costs(), strategy, keeps_spans=keeps) for keeps in (True, False))
    assert full.to_dict() == bare.to_dict()
    assert full.timeline.spans
    assert not bare.timeline.spans


def test_pageable_buffers_slow_copies():
    made = costs()
    slow = replace(made, hardware=made.hardware.with_values({"link.pageable": 0.25}))
    pinned, pageable = (
        simulate(slow, Strategy.of("zero_offload"), pinned=p) for p in (True, False)
    )
    assert pageable.busy_seconds["h2d"] == pytest.approx(4 * pinned.busy_seconds["h2d"], rel=0.01)


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_has_a_name_and_refuses_options_that_are_not_its_own(name):
    assert Strategy.of(name).name == name
    with pytest.raises(ConfigError, match="no_such_knob"):
        simulate(costs(), Strategy.of(name, no_such_knob=1))


def test_an_unknown_strategy_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match="'zenflw' is unknown; did you mean 'zenflow'"):
        Strategy.of("zenflw")


def test_a_run_that_settles_late_is_cut_where_it_is_asked_to_be():
    slow = costs(d2h=3.5)
    strategy = Strategy.of("zenflow_paper", update_interval=4, select_interval=0)
    cut = simulate(slow, strategy, num_steps=8, settling_windows=1, longest_settling=1)
    assert cut.step_seconds < 3.1, "nothing waits for the copies yet"
    assert simulate(slow, strategy, num_steps=8).step_seconds == pytest.approx(3.15, rel=0.002)
