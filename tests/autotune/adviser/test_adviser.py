"""Advice: what follows it ends where the truth is best, within what is allowed."""

import itertools
import math
from dataclasses import replace

import pytest

from autotune.adviser.adviser import Adviser, _value
from autotune.adviser.forecasts import Forecasts
from autotune.constraints import Constraints, needs_of
from autotune.model.refit import Prior
from autotune.model.twin import NEUTRAL, Twin
from autotune.space import SearchSpace
from sim.hardware.catalog import find_machine
from tests.autotune.worlds import (
    CONFIG,
    CURVE,
    HERE,
    SPACE,
    STEEP,
    Truth,
    a_question,
    knobs_at,
    twin,
    workload,
)
from zenflow.errors import ConfigError

pytestmark = pytest.mark.usefixtures("simulated_once")
TRUTHS = {
    "as told": {},
    "slow uploads": {"h2d": 2.5},
    "slow copies down": {"d2h": 2.0, "device": 0.7},
    "slow host": {"host": 3.0, "d2h": 0.8},
}


def adviser(space=SPACE, **limits):
    return Adviser(twin(), space, Constraints(**limits))


def question(stretches=(), here=HERE, **changes):
    settings = {"select_seconds": 0.0, "num_trials": 20, "has_curve": bool(stretches)}
    return a_question(stretches, here, **{**settings, **changes})


def follow(truth, advises, *, start=HERE, seed=0, most=12):
    """Go where advice says, back where it was worse; return where it ends and all it said."""
    here, stretches, said = start, [], []
    for index in range(most):
        stretches.append(truth.stretch(index, here))
        tried = [here, *[s.knobs for s in stretches if s.knobs != here]]
        here = truth.best(tried) if said and not said[-1].must_move else here
        if stretches[-1].knobs != here:
            continue
        advice = advises.advise(question(stretches, here, start=start, seed=seed))
        said.append(advice)
        if advice.best is None:
            break
        here = advice.best.knobs
    return here, said


def test_memory_is_judged_in_the_gradient_mode_of_the_run():
    gpu = find_machine("rtx4090-desktop")
    found = Adviser(Twin(workload(), gpu, CONFIG, releases=False), SPACE).feasibility(None)
    kept, released = (
        needs_of(workload(), gpu, releases=releases, base=CONFIG)(HERE)
        for releases in (False, True)
    )
    assert found.need(HERE) == kept
    assert kept.device_bytes != released.device_bytes


@pytest.mark.parametrize("name", TRUTHS)
def test_following_it_ends_at_the_best_of_the_grid(name):
    truth, advises = Truth(**TRUTHS[name]), adviser()
    here, said = follow(truth, advises)
    assert said[-1].best is None, "it comes to an end"
    assert truth.shortfall(here, SPACE.grid()) < 0.02
    forecast = advises.twin.forecast(here, said[-1].constants)
    assert forecast.step_seconds == pytest.approx(truth.forecast(here).step_seconds, rel=0.05)


@pytest.mark.parametrize("here", [knobs_at(update_interval=1), knobs_at(update_interval=16)])
def test_it_finds_the_best_from_wherever_it_starts(here):
    truth = Truth(h2d=1.5)
    found, _ = follow(truth, adviser(), start=here)
    assert truth.shortfall(found, SPACE.grid()) < 0.02


def host_bytes_of_the_median_setting():
    needs = adviser().feasibility(None)
    found = sorted(needs.need(knobs).host_bytes for knobs in SPACE.grid())
    return found[len(found) // 2]


@pytest.mark.parametrize(
    "limits",
    [
        lambda: {"largest_staleness": 4},
        lambda: {"smallest_captured": 0.2, "largest_staleness": 6},
        lambda: {"host_bytes": host_bytes_of_the_median_setting()},
    ],
    ids=["staleness", "two", "memory"],
)
def test_nothing_is_proposed_that_breaks_a_constraint(limits):
    advises = adviser(**limits())
    allowed = advises.feasibility(CURVE)
    kept = [knobs for knobs in SPACE.grid() if allowed.allows(knobs)]
    assert 0 < len(kept) < len(list(SPACE.grid())), "the limit parts the space"
    truth = Truth(h2d=2.5)
    start = advises.start(HERE)
    assert allowed.allows(start)
    here, said = follow(truth, advises, start=start)
    for advice in said:
        assert allowed.allows(advice.peak.knobs)
        assert advice.best is None or allowed.allows(advice.best.knobs)
    assert truth.shortfall(here, kept) < 0.02


def test_a_setting_that_breaks_a_constraint_now_known_must_be_left():
    limited = adviser(smallest_captured=0.4)
    before = limited.advise(question())
    assert not before.must_move, "nobody has measured a curve"
    after = limited.advise(question([Truth().stretch(0, HERE)]))
    assert after.must_move
    assert CURVE.captured(after.best.knobs.topk_ratio) >= 0.4


def test_it_must_be_left_even_for_what_is_slower():
    truth = Truth()
    best = truth.best(SPACE.grid())
    limited = adviser(largest_staleness=2)
    advice = limited.advise(question([truth.stretch(0, best)], best))
    assert advice.must_move
    assert advice.best.gain < 0
    assert advice.best.knobs.update_interval == 1


def test_what_may_be_much_worse_than_the_default_is_not_tried():
    """From a bad place everything near is a gain; the default is the measure all the same."""
    bad = knobs_at(update_interval=1, topk_ratio=0.05)
    space = replace(SPACE, update_intervals=(1, 2), topk_ratios=(0.05, 0.1))
    truth = Truth(h2d=2.0)
    stretches = [truth.stretch(0, bad)]
    reached = space.grid()
    assert truth.progress(HERE) > 1.3 * max(truth.progress(knobs) for knobs in reached)
    best = adviser(space).advise(question(stretches, bad)).best
    assert best is None
    best = adviser(space).advise(question(stretches, bad, start=bad)).best
    assert best is not None
    assert best.knobs.update_interval == 2


def test_before_anything_is_measured_a_vague_belief_moves_nothing():
    slow = knobs_at(update_interval=1)
    sure = adviser().advise(question(here=slow, start=slow, prior=Prior(NEUTRAL, 0.02)))
    assert sure.best is not None
    vague = adviser().advise(question(here=slow, start=slow, prior=Prior(NEUTRAL, 3.0)))
    assert vague.best is None


def test_what_promises_more_than_its_error_alone_is_tried_where_probing_has_failed():
    truth = Truth(device=1.3)
    for here in itertools.islice(SPACE.grid(), 0, None, 14):
        stretches = [truth.stretch(0, here)]
        best = adviser().advise(question(stretches, here, start=here, may_probe=False)).best
        assert best is None or best.gain > best.error


def test_with_no_time_left_a_probe_is_not_worth_its_trouble():
    truth = Truth()
    best = truth.best(SPACE.grid())
    here = replace(best, update_interval=2)
    stretches = [truth.stretch(0, here)]
    assert adviser().advise(question(stretches, here, start=here)).best is not None
    late = adviser().advise(question(stretches, here, start=here, stretches_left=0.0))
    assert late.best is None


@pytest.fixture
def steep(monkeypatch):
    for place in ("autotune.adviser.forecasts", "tests.autotune.worlds"):
        monkeypatch.setattr(f"{place}.FITTED", STEEP)


def test_where_a_measurement_would_tell_little_nothing_is_tried():
    truth = Truth(h2d=0.5)
    here = knobs_at(topk_ratio=0.3, update_interval=8)

    def advice(factors):
        stretches = [truth.stretch(i, here, slower=factor) for i, factor in enumerate(factors)]
        return adviser().advise(question(stretches, here, stretches_left=20))

    assert advice([1.0] * 6).best is not None
    assert advice([1.0, 1.3, 0.8, 1.25, 0.75, 1.0]).best is None


def test_a_machine_whose_speed_wanders_makes_what_was_measured_long_ago_uncertain():
    truth, other = Truth(), knobs_at(update_interval=8)

    def error(factors):
        stretches = [truth.stretch(0, other)]
        stretches += [truth.stretch(i, HERE, slower=f) for i, f in enumerate(factors, start=1)]
        forecasts = Forecasts.of(question(stretches), twin(), SPACE.select_intervals)
        return forecasts.as_it_is(other).error

    waves = [math.exp(0.2 * math.sin(i / 6)) for i in range(20)]
    assert error(waves) > 1.7 * error([1.0] * 20)


EVERY = replace(SPACE, select_intervals=(50, 100, 200, 400), topk_ratios=(0.1,))


def selecting(decay, select_seconds, here=HERE):
    """Return the advice at the best setting, where only the selections are left to choose."""
    truth = Truth()
    best = truth.best(k for k in EVERY.grid() if k.select_interval == here.select_interval)
    stretches = [truth.stretch(i, best) for i in range(2)]
    asked = question(
        stretches, best, start=best, energy_decay=decay, select_seconds=select_seconds
    )
    return best, adviser(EVERY).advise(asked)


@pytest.mark.usefixtures("steep")
def test_selections_are_as_often_as_their_cost_and_the_energys_decay_ask_for():
    best, advice = selecting(decay=0.0, select_seconds=0.5)
    assert advice.best.knobs == replace(best, select_interval=400)
    best, advice = selecting(decay=0.004, select_seconds=0.001)
    assert advice.best.knobs == replace(best, select_interval=50)


def test_selections_of_what_is_in_force_are_weighed_though_no_search_has_looked_at_it(monkeypatch):
    monkeypatch.setattr("autotune.adviser.adviser.search", lambda *_: [])
    best, advice = selecting(decay=0.0, select_seconds=0.5)
    assert advice.best.knobs == replace(best, select_interval=400)


@pytest.mark.parametrize(("gain", "is_worth_it"), [(0.003, True), (0.0005, False)])
def test_little_is_enough_to_select_less_often_as_nothing_stalls_by_it(gain, is_worth_it):
    step = Truth().forecast(HERE).step_seconds
    best, advice = selecting(decay=0.0, select_seconds=gain * step / (1 / 100 - 1 / 400))
    rarely = advice.best is not None and advice.best.knobs == replace(best, select_interval=400)
    assert rarely == is_worth_it


def test_what_is_in_force_is_looked_at_as_it_is():
    best, advice = selecting(decay=0.0, select_seconds=0.5)
    assert advice.here.knobs == best
    assert (advice.here.gain, advice.here.error) == (0.0, 0.0)


def test_selections_stay_as_often_as_they_are_while_their_decay_is_unknown():
    _, advice = selecting(decay=None, select_seconds=0.5)
    assert advice.best is None or advice.best.knobs.select_interval == HERE.select_interval
    assert advice.peak.knobs.select_interval == HERE.select_interval


def test_the_same_question_has_the_same_answer_by_the_same_way():
    asked = question([Truth(h2d=2.0).stretch(0, HERE)], seed=3)
    answers, ways = [], []
    for _ in range(2):
        advises = adviser()
        answers.append(replace(advises.advise(asked), seconds=0.0))
        ways.append(list(advises.twin._known))
    assert answers[0] == answers[1]
    assert ways[0] == ways[1]


def test_what_is_barred_is_tried_only_where_the_gain_is_sure():
    truth, advises = Truth(h2d=2.5), adviser()
    first = truth.stretch(0, HERE)
    told = advises.advise(question([first]))
    assert told.best.gain > told.best.error
    barred = frozenset([replace(told.best.knobs, select_interval=0)])
    assert advises.advise(question([first], barred=barred)).best == told.best
    # At the best there are only settings left of which nobody can tell.
    truth = Truth()
    here = truth.best(SPACE.grid())
    stretches = [truth.stretch(0, here)]
    probe = advises.advise(question(stretches, here)).best
    assert probe.gain < probe.error
    barred = frozenset([replace(probe.knobs, select_interval=0)])
    other = advises.advise(question(stretches, here, barred=barred)).best
    assert other is None or other.knobs != probe.knobs


def test_what_is_barred_must_promise_as_many_errors_as_a_trial_must_show():
    """Else what is 1.5 errors better would be left without proof and taken up again at once."""
    truth, other = Truth(), knobs_at(update_interval=8)

    def value(gain, barred):
        asked = question([truth.stretch(0, HERE)], barred=frozenset(barred), stretches_left=50)
        forecasts = Forecasts.of(asked, twin(), SPACE.select_intervals)
        setting = replace(forecasts.as_it_is(other), gain=gain, error=0.02)
        return _value(forecasts, setting)

    lost = [replace(other, select_interval=0)]
    alike = [replace(lost[0], topk_ratio=1.5 * other.topk_ratio)]
    unlike = [replace(lost[0], topk_ratio=0.5), replace(lost[0], update_interval=1)]
    assert value(0.03, alike) == 0, "what is like it has hardly another chance"
    assert value(0.03, unlike) > 0
    assert value(0.03, []) > 0
    assert value(0.03, lost) == 0
    assert value(0.05, lost) > 0


def test_what_a_search_saw_is_weighed_anew_without_simulating():
    truth, advises = Truth(h2d=2.5), adviser()
    first = truth.stretch(0, HERE)
    searched = advises.advise(question([first]))
    assert searched.num_simulated > 0
    best = searched.best.knobs
    again = advises.advise(question([first], num_trials=0))
    assert replace(again, seconds=0.0) == replace(searched, num_simulated=0, seconds=0.0)
    # What looked best turns out to be slow: another setting is next, at no simulation's cost.
    slow = truth.stretch(1, best, slower=3.0)
    back = truth.stretch(2, HERE)
    other = advises.advise(question([first, slow, back], num_trials=0))
    assert other.num_simulated == 0
    assert other.constants == searched.constants
    assert other.best is None or other.best.knobs != best
    assert other.peak.knobs != best


def test_what_was_measured_can_be_returned_to_though_no_search_saw_it():
    near = replace(SPACE, topk_ratios=(0.1,), update_intervals=(4, 8))
    truth, advises = Truth(h2d=2.5), adviser(near)
    strange = knobs_at(topk_ratio=0.3, update_interval=2)
    stretches = [truth.stretch(0, strange, slower=0.5), truth.stretch(1, HERE)]
    for num_trials in (6, 0):
        advice = advises.advise(question(stretches, num_trials=num_trials))
        assert advice.best.knobs == strange


@pytest.mark.parametrize("ratios", [(0.1,), (0.05, 0.1)])
def test_the_price_of_a_forecast_is_that_of_one_that_was_not_made_before(ratios):
    asks = adviser(SearchSpace(topk_ratios=ratios, update_intervals=(2, 4, 8)))
    asks.seconds_per_forecast()
    assert asks.twin.num_simulated == 2


def test_nothing_can_be_weighed_anew_before_a_search():
    with pytest.raises(ValueError, match="first question needs trials"):
        adviser().advise(question([Truth().stretch(0, HERE)], num_trials=0))


def test_what_is_as_good_about_here_is_a_range_of_s_with_here_in_it():
    truth = Truth()
    for here in (HERE, truth.best(SPACE.grid())):
        advice = adviser().advise(question([truth.stretch(0, here)], here))
        low, high = advice.intervals
        assert low <= here.update_interval <= high
        for interval in SPACE.update_intervals:
            if low <= interval <= high:
                same = replace(here, update_interval=interval)
                assert truth.progress(same) > 0.97 * truth.progress(here)


def test_equal_settings_make_a_range_even_where_selections_may_be_chosen():
    """Bounds are of S alone: how often columns are selected is another matter."""
    flat = replace(EVERY, update_intervals=(4, 6, 8))
    truth = Truth(h2d=0.1)
    asked = question([truth.stretch(0, HERE)], select_seconds=0.5)
    without = adviser(flat).advise(asked).intervals
    chosen = adviser(flat).advise(replace(asked, energy_decay=0.0)).intervals
    assert chosen == without


def test_predictions_are_corrected_by_what_was_measured():
    truth = Truth()
    odd = truth.stretch(0, HERE, slower=1.2)  # by something that no lane explains
    advice = adviser().advise(question([odd]))
    assert advice.here.step_seconds == pytest.approx(odd.step_seconds, rel=0.02)
    assert advice.error == pytest.approx(-math.log(1.2), abs=0.02)


def test_constraints_that_contradict_each_other_are_refused():
    with pytest.raises(ConfigError, match="staleness"):
        adviser(largest_staleness=1).advise(question())
    with pytest.raises(ConfigError, match="captured"):
        adviser(smallest_captured=0.9).advise(question([Truth().stretch(0, HERE)]))


def test_the_start_is_what_was_wanted_or_the_nearest_that_is_allowed():
    assert adviser().start(HERE) == HERE
    near = adviser(largest_staleness=4).start(HERE)
    assert near == replace(HERE, update_interval=2)
    with pytest.raises(ConfigError, match="staleness"):
        adviser(largest_staleness=1).start(HERE)


def test_s_alone_is_left_to_the_controller_that_moves_it():
    """Else the two would undo one another's choice without end."""
    truth, space = Truth(), SPACE
    for here in (knobs for knobs in space.grid() if knobs.topk_ratio == HERE.topk_ratio):
        stretches = [truth.stretch(0, here)]
        asked = question(stretches, here, leaves_interval=True)
        advice = adviser(space).advise(asked)
        low, high = advice.intervals
        assert low <= here.update_interval <= high
        if advice.best is not None and advice.best.knobs.topk_ratio == here.topk_ratio:
            moved = replace(advice.best.knobs, update_interval=here.update_interval)
            if moved == here:
                assert advice.best.gain > 0.01
                assert not low <= advice.best.knobs.update_interval <= high
