"""TrialRules: scripted stretches and answers in, moves out."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest

from autotune.adviser.messages import Advice, ForecastedSetting
from autotune.model.twin import NEUTRAL
from autotune.online.trial_rules import TrialRules
from tests.autotune.worlds import a_stretch
from zenflow.config import ZenFlowConfig
from zenflow.knobs import Knobs

START = Knobs.of(ZenFlowConfig())
OTHER = replace(START, update_interval=8)
THIRD = replace(START, topk_ratio=0.2)
MOVED = {**NEUTRAL, "d2h": 1.7}


def a_tuner():
    return TrialRules(START, 0.35)


def setting(knobs, gain=0.0, error=0.01, step=1.0):
    return ForecastedSetting(
        knobs=knobs, step_seconds=step, efficiency=0.9, gain=gain, error=error
    )


def advice(here, best=None, gain=0.1, error=0.01, must_move=False, constants=MOVED):
    better = None if best is None else setting(best, gain, error, step=0.9)
    return Advice(
        constants=constants,
        here=setting(here),
        best=better,
        must_move=must_move,
        peak=better or setting(here),
        intervals=(1, 8),
        error=0.0,
        num_simulated=5,
        seconds=0.1,
    )


def resumed_from(tuner):
    resumed = a_tuner()
    resumed.load_state_dict(json.loads(json.dumps(tuner.state_dict())))
    return resumed


class Script:
    """Feeds a tuner, and counts the stretches."""

    def __init__(self):
        self.tuner = a_tuner()
        self.index = 0

    def measure(self, seconds=1.0, *, noise=0.002):
        busy = {"device": 0.5 * seconds}
        stretch = a_stretch(self.index, self.tuner.here, seconds, noise=noise, busy_seconds=busy)
        self.index += 1
        return self.tuner.record(stretch)

    def advise(self, *args, **kwargs):
        self.tuner.question()
        return self.answer(*args, **kwargs)

    def answer(self, *args, **kwargs):
        return self.tuner.consider(advice(self.tuner.here, *args, **kwargs))


def test_what_is_advised_is_tried_and_kept_if_it_is_better():
    script = Script()
    assert script.measure() is None
    assert script.tuner.wants_advice
    script.tuner.question()
    assert not script.tuner.wants_advice, "nothing new is known"
    move = script.answer(OTHER)
    assert (move.new, script.tuner.here, script.tuner.home) == (OTHER, OTHER, START)
    assert move.predicted_step_seconds == 0.9
    assert move.gain == pytest.approx(0.105, abs=1e-3)
    assert not script.tuner.wants_advice, "it is on trial"
    assert script.measure(0.8) is None
    assert (script.tuner.here, script.tuner.home) == (OTHER, None)
    assert script.tuner.wants_advice


def test_what_turns_out_worse_is_undone_at_once_with_the_measured_loss():
    script = Script()
    script.measure()
    script.advise(OTHER)
    move = script.measure(1.2)
    assert (move.new, script.tuner.here, script.tuner.home) == (START, START, None)
    assert "worse" in move.reason
    assert move.gain > 0.1
    assert move.predicted_step_seconds == 1.0


def test_a_state_that_lacks_a_constant_of_today_has_it_as_it_was_believed():
    state = json.loads(json.dumps(Script().tuner.state_dict()))
    del state["constants"]["step"], state["prior"]["centre"]["step"]
    resumed = a_tuner()
    resumed.load_state_dict(state)
    assert resumed.question().prior == a_tuner().question().prior
    assert resumed.state_dict()["constants"] == a_tuner().state_dict()["constants"]


@pytest.mark.parametrize(("error", "stays"), [(0.02, True), (0.2, False)])
def test_in_a_tie_what_was_predicted_stays_and_what_was_only_tried_goes(error, stays):
    script = Script()
    script.measure(1.0, noise=0.05)
    script.advise(OTHER, gain=0.1, error=error)
    assert script.measure(0.9, noise=0.05) is None
    script.tuner = resumed_from(script.tuner)
    moves = [script.measure(0.9, noise=0.05) for _ in range(2)]
    assert script.tuner.home is None, "after three looks it is judged whatever the noise"
    if stays:
        assert moves == [None, None]
        assert script.tuner.here == OTHER
    else:
        assert [move is None for move in moves] == [True, False]
        assert "no better than its noise" in moves[-1].reason
        assert replace(OTHER, select_interval=0) in script.tuner.question().barred


def test_one_lucky_look_does_not_make_a_setting_stay():
    script = Script()
    for seconds in (1.0, 1.04, 0.96, 1.02, 0.98):
        script.measure(seconds)
    script.advise(OTHER, gain=0.01, error=0.04)
    assert script.measure(0.92) is None
    assert script.tuner.home == START, "it is still on trial"
    assert script.measure(1.12).new == START


def test_a_trial_in_a_fast_minute_is_not_a_fast_setting():
    """The machine has become 10 % faster meanwhile: what counts is the neighbours."""
    script = Script()
    for seconds in (1.1, 1.1, 1.1, 1.08, 1.04, 1.0):
        script.measure(seconds)
    script.advise(OTHER, gain=0.01, error=0.04)
    moves = [script.measure(1.0) for _ in range(3)]
    assert moves[-1] is not None or moves[0] is not None
    assert script.tuner.here == START


def test_a_faster_step_that_is_worth_less_is_undone():
    """Goodput decides, not step time: S = 64 makes a step of 0.99 a bad bargain."""
    stale = replace(START, update_interval=64)
    script = Script()
    script.measure()
    script.advise(stale)
    assert script.measure(0.99).new == START


def test_without_a_measurement_here_there_is_nothing_to_go_back_to():
    script = Script()
    assert script.advise(OTHER).new == OTHER
    assert script.tuner.home is None
    assert script.measure(5.0) is None


def test_a_broken_constraint_is_no_trial():
    script = Script()
    script.measure()
    move = script.advise(OTHER, gain=-0.5, must_move=True)
    assert (move.new, script.tuner.home) == (OTHER, None)
    assert "constraint" in move.reason
    assert script.measure(3.0) is None, "worse, and there is no way back"


def test_other_selections_alone_are_no_trial():
    """A stretch leaves selections out, so that two of them can't tell which one is better."""
    script = Script()
    script.measure(1.0)
    script.tuner.question()
    seldom = replace(START, select_interval=400)
    assert script.answer(seldom).new == seldom
    assert script.measure(1.001) is None
    assert script.tuner.here == seldom


def test_an_answer_about_other_knobs_is_dropped():
    script = Script()
    script.measure()
    script.tuner.question()
    assert script.tuner.consider(advice(THIRD, OTHER)) is None
    assert script.tuner.here == START


def test_an_answer_during_a_trial_waits_for_its_end():
    script = Script()
    script.measure()
    script.advise(OTHER)
    assert script.answer(THIRD) is None
    assert script.tuner.here == OTHER


def test_drift_is_seen_after_two_stretches():
    script = Script()
    for _ in range(3):
        script.measure(1.0)
    assert script.measure(1.15) is None
    assert script.tuner.drifts == 0
    script.measure(1.15)
    assert script.tuner.drifts == 1
    assert [s.step_seconds for s in script.tuner.stretches] == [1.15]


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_sudden_drift_is_seen_at_once_in_both_directions(factor):
    script = Script()
    for _ in range(3):
        script.measure(1.0)
    script.measure(factor)
    assert script.tuner.drifts == 1


def test_one_odd_stretch_is_no_drift():
    script = Script()
    for seconds in (1.0, 1.0, 1.15, 1.0, 1.0, 1.15, 1.0):
        script.measure(seconds)
    assert script.tuner.drifts == 0


def test_what_is_within_the_noise_is_no_drift():
    script = Script()
    for seconds in (1.0, 1.2, 0.85, 1.2, 1.2, 0.8):
        script.measure(seconds, noise=0.08)
    assert script.tuner.drifts == 0


BUSY = {"device": 0.5, "d2h": 0.3, "h2d": 0.01}


def looked_at(script, seconds=1.0, **changes):
    """Measure a stretch whose lanes were looked at."""
    stretch = a_stretch(script.index, script.tuner.here, seconds, busy_seconds=BUSY | changes)
    script.index += 1
    return script.tuner.record(stretch)


@pytest.mark.parametrize(("changes", "drifts"), [({"d2h": 0.9}, 1), ({"h2d": 0.04}, 0)])
def test_a_lane_that_is_slower_is_a_drift_though_no_step_shows_it(changes, drifts):
    """A lane that is nearly idle is none."""
    script = Script()
    looked_at(script)
    looked_at(script, **changes)
    assert script.tuner.drifts == drifts


def test_a_trial_that_is_lost_by_a_slower_lane_is_the_machines_loss():
    """Home was measured on the machine as it was: going back would say nothing."""
    for seconds, drifts in ((0.9, 1), (0.25, 0)):
        script = Script()
        looked_at(script)
        script.tuner.question()
        told = advice(START, OTHER)
        script.tuner.consider(replace(told, best=replace(told.best, busy_seconds=BUSY)))
        script.tuner = resumed_from(script.tuner)
        move = looked_at(script, 2.0, d2h=seconds)
        assert script.tuner.drifts == drifts
        assert (move is None, script.tuner.here) == ((True, OTHER) if drifts else (False, START))


def test_steps_that_change_at_once_in_a_trial_are_a_drift():
    script = Script()
    script.measure()
    script.advise(OTHER)
    stretch = a_stretch(script.index, OTHER, 1.3, before_shift=1.0)
    assert script.tuner.record(stretch) is None
    assert (script.tuner.drifts, script.tuner.home) == (1, None)
    assert script.tuner.question().stretches == (stretch,)


def test_after_a_lost_trial_home_is_measured_before_anything_is_asked():
    script = Script()
    script.measure()
    script.advise(OTHER)
    assert script.measure(1.2).new == START
    assert not script.tuner.wants_advice
    script.measure(1.0)
    assert script.tuner.wants_advice


def test_steps_beside_a_search_that_are_far_off_are_a_first_sign():
    script = Script()
    script.measure(1.0)
    assert not script.tuner.is_strange(1.2)
    assert script.tuner.is_strange(1.5)
    assert not script.tuner.wants_advice, "here is measured first"
    script.measure(1.2)
    assert script.tuner.drifts == 1


def test_a_setting_that_was_measured_before_a_drift_is_judged_by_home_as_it_is_now():
    script = Script()
    script.measure(1.0)
    script.advise(OTHER)
    script.measure(0.7)
    script.advise(THIRD, gain=0.3)
    script.measure(0.5)
    script.advise(OTHER, gain=0.3)
    move = script.measure(2.0)
    assert script.tuner.drifts == 1
    assert (move.new, script.tuner.here) == (THIRD, THIRD)


def settle(script, most=20):
    """Answer that there is nothing better until nobody asks."""
    for _ in range(most):
        script.measure()
        if script.tuner.wants_advice:
            script.advise()
        if script.tuner.is_settled:
            return
    raise AssertionError("it goes on asking")


def test_drift_ends_a_trial_and_asks_again_from_what_was_believed_last():
    script = Script()
    settle(script)
    script.measure(2.0)
    assert script.tuner.home is None
    assert script.tuner.wants_advice
    asked = script.tuner.question()
    assert asked.prior.centre == MOVED, "constants found so far are where to begin"
    assert [s.step_seconds for s in asked.stretches] == [2.0]
    assert asked.may_probe


def test_one_who_has_settled_asks_ever_less_often():
    script, asked = Script(), []
    for _ in range(40):
        script.measure()
        if script.tuner.wants_advice:
            asked.append(script.index)
            script.advise()
    gaps = [later - earlier for earlier, later in pairwise(asked)]
    assert gaps == [2, 4, 8, 16]


def fail(script, times):
    for _ in range(times):
        script.measure(1.0)
        script.advise(OTHER, gain=0.02, error=0.05)
        assert script.measure(1.2).new == START


def test_six_failed_trials_end_probing_and_a_success_begins_it_again():
    script = Script()
    fail(script, 5)
    assert script.tuner.question().may_probe
    fail(script, 1)
    assert not script.tuner.question().may_probe
    script.answer(THIRD, gain=0.2, error=0.01)
    assert script.measure(0.5) is None
    assert script.tuner.question().may_probe


def test_failed_trials_are_not_forgotten_over_a_resume():
    script = Script()
    fail(script, 6)
    assert not resumed_from(script.tuner).question().may_probe


def test_drift_forgives_failed_trials():
    script = Script()
    fail(script, 6)
    script.measure(3.0)
    assert script.tuner.drifts == 1
    assert script.tuner.question().may_probe


def test_a_question_has_the_energy_as_it_was_measured_here():
    script = Script()
    script.measure()
    curve = script.tuner.question().curve
    assert curve.captured(START.topk_ratio) == pytest.approx(0.2)


def test_what_is_remembered_is_bounded():
    script = Script()
    for _ in range(60):
        script.measure()
    kept = [s.index for s in script.tuner.stretches]
    assert len(kept) == 24
    assert kept[-1] == 59


def test_a_long_rest_at_one_setting_does_not_make_the_others_strange():
    script = Script()
    script.measure(1.0)
    script.advise(OTHER)
    for _ in range(60):
        script.measure(0.8)
    assert [s.index for s in script.tuner.stretches if s.knobs == START] == [0]
    assert len(script.tuner.stretches) == 24


def test_what_has_lost_is_left_alone_for_longer_each_time():
    script = Script()
    waited = []
    for _ in range(3):
        fail(script, 1)
        setting = replace(OTHER, select_interval=0)
        assert setting in script.tuner.question().barred
        count = 0
        while setting in script.tuner.question().barred:
            script.measure(1.0)
            count += 1
        waited.append(count)
        assert resumed_from(script.tuner).state_dict() == script.tuner.state_dict()
    assert waited == [8, 16, 32]


def test_a_drift_lifts_all_bars():
    script = Script()
    fail(script, 1)
    script.measure(3.0)
    assert script.tuner.drifts == 1
    assert script.tuner.question().barred == frozenset()


def a_life(script, from_step, to_step):
    """Do what happens in these steps of a script, and return all moves and questions."""
    seen = []
    events = {
        0: lambda: script.measure(1.0),
        1: lambda: script.tuner.question(seed=1),
        2: lambda: script.answer(OTHER),
        3: lambda: script.measure(1.3),
        4: lambda: script.measure(1.15),
        5: lambda: script.measure(1.15),
        6: lambda: script.tuner.question(seed=2),
        7: lambda: script.answer(THIRD, gain=0.02, error=0.05),
        8: lambda: script.measure(1.0),
        9: lambda: script.tuner.question(seed=3),
        10: script.answer,
        11: lambda: script.measure(1.0),
        12: lambda: (script.tuner.wants_advice, script.tuner.is_settled),
        13: lambda: script.measure(1.0),
        14: lambda: (script.tuner.wants_advice, script.tuner.is_settled),
        15: lambda: script.tuner.question(seed=4),
    }
    for step in range(from_step, to_step):
        seen.append(events[step]())
    return seen


@pytest.mark.parametrize("cut", range(16))
def test_one_that_was_saved_goes_on_identically(cut):
    whole = Script()
    a_life(whole, 0, cut)
    resumed = Script()
    resumed.tuner = resumed_from(whole.tuner)
    resumed.index = whole.index
    assert resumed.tuner.state_dict() == whole.tuner.state_dict()
    assert a_life(resumed, cut, 16) == a_life(whole, cut, 16)
    assert resumed.tuner.state_dict() == whole.tuner.state_dict()


def test_s_that_another_hand_moved_is_where_it_is():
    script = Script()
    settle(script)
    script.tuner.here = OTHER
    assert script.measure(1.02) is None
    assert script.tuner.question().here == OTHER
