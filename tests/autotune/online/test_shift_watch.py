"""The shift watch: which changes of step times are seen, and which are noise."""

import math
import random

import pytest

from autotune.online.shift_watch import ShiftWatch


def noisy(draw, count, level, noise=0.04):
    return [level * math.exp(noise * draw.gauss(0, 1)) for _ in range(count)]


@pytest.mark.parametrize("factor", [0.7, 1.3, 4.0])
def test_a_shift_is_seen_within_some_steps_with_the_level_before_it(factor):
    draw, watch = random.Random(0), ShiftWatch()
    seconds = noisy(draw, 30, 1.0) + noisy(draw, 12, factor)
    seen = [step for step, one in enumerate(seconds) if watch.take(one)]
    assert seen
    assert 30 < seen[0] < 40
    assert watch.before == pytest.approx(1.0, rel=0.05)


def test_noise_and_spikes_are_no_shift():
    draw, watch = random.Random(1), ShiftWatch()
    seconds = [
        one * (6.0 if draw.random() < 0.05 else 1.0) for one in noisy(draw, 2000, 1.0, 0.08)
    ]
    assert not any(watch.take(one) for one in seconds)


def test_a_burst_that_is_over_leaves_the_level_of_before_it():
    watch = ShiftWatch()
    shifts = [watch.take(one) for one in [1.0] * 20 + [2.0] * 10 + [1.0] * 10]
    assert sum(shifts) == 2
    assert watch.before == 1.0


def test_steps_that_differ_within_every_window_are_no_shift():
    watch = ShiftWatch(period=4)
    assert not any(watch.take(one) for one in [1.0, 1.0, 1.0, 3.0] * 20)
    assert any(watch.take(one) for one in [2.0, 2.0, 2.0, 6.0] * 4)
