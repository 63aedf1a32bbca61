"""The search budget: a share of the run's time, some of it kept for later."""

from __future__ import annotations

import json

import pytest

from autotune.online.budget import FEWEST_TRIALS, SearchBudget


def running(share=0.01, total=1000, steps=100, seconds=0.1, per_trial=0.01):
    budget = SearchBudget(share, total)
    for step in range(1, steps + 1):
        budget.add_step(step, seconds)
    budget.seconds_per_trial = per_trial
    return budget


def test_nothing_may_be_spent_before_a_trial_and_a_step_are_known():
    assert SearchBudget(0.01, 100).num_trials(1) == 0
    budget = SearchBudget(0.01, 100)
    for step in (1, 2):
        budget.add_step(step, 100.0)
        assert budget.num_trials(1) == 0


def test_trials_fit_what_is_left_of_the_share():
    budget = running()  # 100 s in all, so 1 s; 0.82 of it by now, half of that at once
    assert budget.num_trials(1) in (34, 35)
    budget.spent = 0.24
    assert budget.num_trials(1) in (22, 23)
    budget.spent = 0.77  # room for five simulations is not worth a question
    assert budget.num_trials(1) == 0


def test_a_question_that_can_be_paid_for_is_not_put_off_to_save_half_of_the_room():
    budget = running(per_trial=0.05)
    budget.spent = 0.1  # room for 14 simulations, of which six refit and compare
    assert budget.num_trials(1) == 6


def test_the_last_of_it_is_kept_for_a_machine_that_changes():
    budget = SearchBudget(0.01, 20_000)
    budget.seconds_per_trial = 0.025
    for step in range(1, 2001):
        budget.add_step(step, 0.05)
        trials = budget.num_trials(1, is_new=False)
        budget.spent += (trials + 6) * 0.025 if trials else 0.0
    assert budget.num_trials(1, is_new=False) == 0
    assert budget.num_trials(1, is_new=True) == 6


def test_what_is_spent_never_exceeds_the_share_when_trials_cost_what_they_are_said_to():
    budget = SearchBudget(0.01, 2000)
    budget.seconds_per_trial = 0.004
    for step in range(1, 2001):
        budget.add_step(step, 0.05)
        trials = budget.num_trials(1)
        budget.spent += (trials + 6) * 0.004 if trials else 0.0
    assert 0.009 * 100 < budget.spent <= 0.01 * 100


def test_what_comes_before_the_first_step_is_no_time_of_the_run():
    plain, late = SearchBudget(0.01, 1000), SearchBudget(0.01, 1000)
    for budget, first in ((plain, 0.1), (late, 300.0)):
        budget.seconds_per_trial = 0.01
        budget.add_step(1, first)
        assert budget.num_trials(1) == 0
        for step in range(2, 100):
            budget.add_step(step, 0.1)
    assert late.num_trials(1) == plain.num_trials(1) > 0


def test_every_measured_setting_takes_simulations_that_are_no_trials():
    budget = running()  # room for 82 simulations, of which half now
    assert budget.num_trials(1) - budget.num_trials(8) == 14
    budget.spent = 0.695  # for 12: two settings' refit and six trials don't fit
    assert budget.num_trials(1) == 6
    assert budget.num_trials(2) == 0


def test_a_budget_is_too_small_where_the_whole_share_pays_for_no_search():
    budget = running()  # 1 s in all; the least search is of 12 simulations with one setting
    budget.spent = 0.87
    assert budget.num_trials(1) == 0, "not yet"
    assert not budget.is_too_small(1)
    assert budget.is_too_small(2)
    budget.spent = 0.89
    assert budget.is_too_small(1)


def test_trials_end_before_what_follows_them_would_exceed_the_share():
    budget = running(per_trial=0.01)
    assert 0.02 <= budget.seconds_left - budget.seconds_for_trials(FEWEST_TRIALS) <= 0.05
    budget.spent = 1.0
    assert budget.seconds_for_trials(FEWEST_TRIALS) == 0.0


def test_trials_that_cost_more_than_was_said_leave_room_to_weigh_settings_anew():
    budget = running(per_trial=0.01)
    trials = budget.num_trials(1)
    assert trials > FEWEST_TRIALS
    room = budget.seconds_left
    budget.spent += budget.seconds_for_trials(trials) + 3 * 0.01  # where the limit ended them
    assert budget.seconds_left >= 0.49 * room


def test_a_run_that_gets_faster_is_not_overspent():
    """What its beginning would have allowed for the whole is more than a hundredth of it."""
    budget = SearchBudget(0.01, 1000)
    for step in range(1, 1001):
        budget.add_step(step, 0.2 if step <= 300 else 0.1)
        budget.spent += max(0.0, budget.seconds_left) if step > 320 else 0.0
    assert 1.25 < budget.spent <= 0.01 * (0.2 * 299 + 0.1 * 700) * 1.002


def test_an_evaluation_between_two_steps_is_no_time_of_the_run():
    plain, evaluated = running(), running()
    plain.add_step(101, 0.1)
    evaluated.add_step(101, 60.0)
    assert evaluated.seconds_left == pytest.approx(plain.seconds_left)


def test_a_saved_budget_goes_on(tmp_path):
    budget = running()
    budget.spent = 0.2
    again = SearchBudget(0.01, 1000)
    again.load_state_dict(json.loads(json.dumps(budget.state_dict())))
    again.seconds_per_trial = budget.seconds_per_trial
    assert again.num_trials(1) == budget.num_trials(1) in (24, 25)
