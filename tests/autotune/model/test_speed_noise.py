"""SpeedNoise: settings are told apart although the machine's own speed moves."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.model.speed_noise import SpeedNoise, paired_gain
from tests.autotune.worlds import HERE, a_stretch, knobs_at

OTHER, THIRD = knobs_at(update_interval=8), knobs_at(topk_ratio=0.3)


def worth(item):
    return -math.log(item.step_seconds)


def test_on_a_steady_machine_the_contrast_is_the_difference_of_the_means():
    measured = [a_stretch(0, HERE, 1.0), a_stretch(1, OTHER, 0.8), a_stretch(2, THIRD, 0.5)]
    gain, error = paired_gain(measured, worth, OTHER, HERE)
    assert gain == pytest.approx(math.log(1.0 / 0.8))
    assert error == pytest.approx(SpeedNoise().between_neighbours, rel=1e-6)


pieces = st.lists(
    st.tuples(st.sampled_from([HERE, OTHER, THIRD]), st.floats(0.5, 2.0), st.floats(0.0, 0.1)),
    min_size=1,
    max_size=8,
)


@given(pieces)
def test_the_contrast_is_the_textbooks_generalised_least_squares(rest):
    """By the normal equations with the inverse written out, in the variance of a weighted sum."""
    rest = [(HERE, 1.0, 0.01), (OTHER, 1.1, 0.01), *rest]
    measured = [a_stretch(i, knobs, s, noise=noise) for i, (knobs, s, noise) in enumerate(rest)]
    speed_noise = SpeedNoise.of(measured)
    names = sorted({s.knobs for s in measured}, key=str)
    design = np.array([[s.knobs == k for k in names] for s in measured], float)
    times = np.arange(len(measured))
    covariance = speed_noise.deviation**2 * np.exp(-abs(times[:, None] - times) / 8.0)
    covariance += np.diag([max(s.noise, speed_noise.white, 0.005) ** 2 for s in measured])
    inverse = np.linalg.inv(covariance)
    sides = np.array([1.0 if k == OTHER else -1.0 if k == HERE else 0.0 for k in names])
    weights = sides @ np.linalg.inv(design.T @ inverse @ design) @ design.T @ inverse
    gain, error = paired_gain(measured, worth, OTHER, HERE)
    assert gain == pytest.approx(weights @ [worth(s) for s in measured], abs=1e-8)
    assert error == pytest.approx(math.sqrt(weights @ covariance @ weights), rel=1e-6)
    back, same = paired_gain(measured, worth, HERE, OTHER)
    assert (back, same) == (pytest.approx(-gain, abs=1e-12), pytest.approx(error))


def a_machine_that_becomes_faster():
    """HERE is 2 % better than OTHER, but was measured in the slow minutes for the most part."""
    order = [HERE] * 6 + [OTHER, HERE, OTHER, HERE, OTHER] + [OTHER] * 6
    speeds = [0.12 * math.tanh((i - 8) / 6) for i in range(len(order))]
    return [
        a_stretch(i, knobs, math.exp((knobs == OTHER) * 0.02 - speed))
        for i, (knobs, speed) in enumerate(zip(order, speeds, strict=True))
    ]


def test_a_setting_that_was_measured_in_a_fast_minute_is_not_taken_for_a_fast_one():
    measured = a_machine_that_becomes_faster()
    mean = {
        knobs: np.mean([worth(s) for s in measured if s.knobs == knobs]) for knobs in (HERE, OTHER)
    }
    assert mean[OTHER] - mean[HERE] > 0.05, "what the plain means would say"
    gain, error = paired_gain(measured, worth, OTHER, HERE)
    assert gain == pytest.approx(-0.02, abs=2 * error)
    assert gain < 0
    assert error < 0.04


def test_what_wanders_is_told_from_noise():
    rng = random.Random(0)
    white = [a_stretch(i, HERE, math.exp(rng.gauss(0, 0.05))) for i in range(200)]
    seen = SpeedNoise.of(white)
    assert seen.white == pytest.approx(0.05, rel=0.2)
    assert seen.seen < 0.02
    slow = [a_stretch(i, HERE, math.exp(0.1 * math.sin(i / 15))) for i in range(200)]
    seen = SpeedNoise.of(slow)
    assert seen.seen == pytest.approx(0.1 / math.sqrt(2), rel=0.15)
    assert seen.white < 0.01


def test_without_repeats_the_machine_is_any_machine():
    assert (
        SpeedNoise.of([])
        == SpeedNoise.of([a_stretch(0, HERE, 1.0), a_stretch(1, OTHER, 2.0)])
        == SpeedNoise()
    )


def test_a_machine_that_is_steady_for_long_is_believed_to_be():
    def deviation(count):
        return SpeedNoise.of([a_stretch(i, HERE, 1.0) for i in range(count)]).deviation

    assert deviation(2) == pytest.approx(0.03 * math.sqrt(2 / 3))
    assert deviation(24) < 0.01


def test_neighbours_tell_more_than_stretches_far_apart():
    near = [a_stretch(0, HERE, 1.0), a_stretch(1, OTHER, 1.0)]
    far = [near[0], replace(near[1], index=40)]
    assert paired_gain(near, worth, HERE, OTHER)[1] < 0.6 * paired_gain(far, worth, HERE, OTHER)[1]
