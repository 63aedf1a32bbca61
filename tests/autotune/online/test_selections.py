"""Selections: their cost and what they lose with age, told from reports."""

import random

import pytest

from autotune.online.stretches import SelectionWatch
from tests.zenflow.step.test_reporter import a_report


def watched(watch, *, selections=3, every=40, decay=0.002, waits=(5.0, 0.1, 0.1), noise=0.0):
    """Show reports of selections, ``every`` steps apart, and of the steps between them."""
    draw = random.Random(0)
    for index in range(selections):
        watch.take(a_report(stalls={"select": waits[min(index, len(waits) - 1)]}))
        for age in range(every):
            captured = 0.6 - decay * age + draw.gauss(0.0, noise)
            watch.take(a_report(stalls={}, captured_energy=captured))
    return watch


def test_nothing_is_known_at_first():
    watch = SelectionWatch()
    assert (watch.seconds, watch.decay) == (None, None)


def test_the_first_selection_which_moves_most_columns_does_not_count():
    assert watched(SelectionWatch(), selections=1).seconds is None
    watch = watched(SelectionWatch(), selections=3, waits=(5.0, 0.1, 0.2))
    assert watch.seconds == pytest.approx(0.15)


def test_one_slow_selection_among_several_hardly_counts():
    watch = watched(SelectionWatch(), selections=6, waits=(5.0, 0.1, 9.0, 0.1, 0.1, 0.1))
    assert watch.seconds == pytest.approx(0.1)


@pytest.mark.parametrize("decay", [0.0005, 0.002])
def test_the_trend_between_selections_is_found(decay):
    watch = watched(SelectionWatch(), decay=decay)
    assert watch.decay == pytest.approx(decay)


def test_the_trend_is_found_in_noise():
    watch = watched(SelectionWatch(), selections=5, every=200, decay=0.001, noise=0.05)
    assert watch.decay == pytest.approx(0.001, rel=0.2)


def test_captured_energy_that_grows_is_no_decay():
    assert watched(SelectionWatch(), decay=-0.001).decay == 0.0


def test_too_few_steps_tell_no_trend():
    assert watched(SelectionWatch(), every=10).decay is None


def test_longer_spans_weigh_more():
    watch = SelectionWatch()
    watched(watch, selections=2, every=25, decay=0.01)
    watched(watch, selections=2, every=400, decay=0.001)
    assert watch.decay == pytest.approx(0.001, rel=0.05)


def test_what_a_change_of_knobs_cut_in_two_is_left_out():
    watch = watched(SelectionWatch(), selections=2, decay=0.002)
    seconds, decay = watch.seconds, watch.decay
    for _ in range(30):
        watch.take(a_report(stalls={}, captured_energy=0.9))
    watch.interrupt()
    for _ in range(30):
        watch.take(a_report(stalls={}, captured_energy=0.1))
    for waited in (7.0, 0.0, 0.0, 0.0):
        watch.take(a_report(stalls={"select": waited}))
    assert (watch.seconds, watch.decay) == (seconds, decay)
    for waited in (0.3, 0.0, 0.0, 0.0):
        watch.take(a_report(stalls={"select": waited}))
    assert watch.seconds == pytest.approx(0.2)


def test_a_selection_that_blocks_wait_for_one_by_one_is_all_of_its_steps():
    """With rolling windows a part of the blocks selects in each of S steps."""
    watch = SelectionWatch()
    for parts in ((3.0, 3.0, 3.0, 3.0), (0.1, 0.2, 0.0, 0.3), (0.2, 0.1, 0.3, 0.2)):
        for waited in parts:
            watch.take(a_report(update_interval=4, stalls={"select": waited}))
        for _ in range(30):
            watch.take(a_report(update_interval=4, stalls={}))
    assert watch.seconds == pytest.approx(0.7)


def test_a_change_in_the_middle_of_a_selection_leaves_its_rest_out():
    watch = watched(SelectionWatch(), selections=2)
    watch.take(a_report(update_interval=16, stalls={"select": 5.0}))
    watch.interrupt()
    watch.take(a_report(update_interval=1, stalls={"select": 9.0}))  # all columns, for another k
    watch.take(a_report(update_interval=1, stalls={}))
    watch.take(a_report(update_interval=1, stalls={"select": 0.3}))
    assert watch.seconds == pytest.approx(0.2), "0.1 before the change and 0.3 after it"
