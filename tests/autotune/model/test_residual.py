"""Residual: a Gaussian process as the textbook has it, and what follows from it."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.model.residual import Residual
from autotune.model.speed_noise import SpeedNoise
from tests.autotune.worlds import a_stretch
from zenflow.config import ZenFlowConfig
from zenflow.knobs import Knobs

START = Knobs.of(ZenFlowConfig())
STRUCTURE, WEIGHT, OFFSET, LEAST_NOISE = 0.06, 4.0, 0.3, 0.005
WANDER_TIME = 8.0
RESTLESS = SpeedNoise(seen=0.08, white=0.02, num_repeats=9)


@dataclass(frozen=True)
class Evidence:
    """A stretch beside its prediction."""

    knobs: Knobs
    log_ratio: float
    noise: float
    time: int


def residual_of(evidence, speed_noise=None):
    stretches = [a_stretch(item.time, item.knobs, noise=item.noise) for item in evidence]
    ratios = [item.log_ratio for item in evidence]
    return Residual(stretches, ratios, speed_noise or SpeedNoise())


settings_of_knobs = st.builds(
    lambda k, interval: replace(START, topk_ratio=k, update_interval=interval),
    st.sampled_from([0.02, 0.1, 0.4]),
    st.sampled_from([1, 2, 4, 16]),
)
pieces = st.builds(
    lambda knobs, ratio, noise, time: Evidence(
        knobs=knobs, log_ratio=ratio, noise=noise, time=time
    ),
    settings_of_knobs,
    st.floats(-0.4, 0.4),
    st.floats(0.0, 0.1),
    st.integers(0, 20),
)
evidence_lists = st.lists(pieces, min_size=1, max_size=8)


def place(knobs):
    return np.array([math.log2(knobs.update_interval) / 2, math.log(knobs.topk_ratio) / 1.5])


def dense(evidence, one, other, speed_noise):
    """Return both settings' mean and the error of their difference, by inverting the matrix."""
    by_setting = {}
    for item in evidence:
        by_setting.setdefault(item.knobs, []).append(item.log_ratio)
    centres = [np.median(values) for values in by_setting.values()]
    structure = STRUCTURE
    if len(centres) > 1:
        squares = len(centres) * max(0.0, np.var(centres, ddof=1) - speed_noise.seen**2)
        structure = math.sqrt((WEIGHT * STRUCTURE**2 + squares) / (WEIGHT + len(centres)))

    def kernel(a, b):
        return structure**2 * math.exp(-((place(a) - place(b)) ** 2).sum() / 2) + OFFSET**2

    values = np.array([item.log_ratio for item in evidence])
    middle = np.median(values)
    gram = np.array([[kernel(a.knobs, b.knobs) for b in evidence] for a in evidence])
    times = np.array([e.time for e in evidence])
    shared = speed_noise.deviation**2 * np.exp(-abs(times[:, None] - times) / WANDER_TIME)
    noise = [max(e.noise, speed_noise.white, LEAST_NOISE) ** 2 for e in evidence]
    inverse = np.linalg.inv(gram + shared + np.diag(noise))
    cross = np.array([[kernel(e.knobs, knobs) for e in evidence] for knobs in (one, other)])
    means = middle + cross @ inverse @ (values - middle)
    prior = np.array([[kernel(a, b) for b in (one, other)] for a in (one, other)])
    posterior = prior - cross @ inverse @ cross.T
    variance = posterior[0, 0] + posterior[1, 1] - 2 * posterior[0, 1]
    return means[0], means[1], math.sqrt(max(0.0, variance))


@given(
    evidence_lists, settings_of_knobs, settings_of_knobs, st.sampled_from([SpeedNoise(), RESTLESS])
)
def test_the_posterior_is_the_textbooks(evidence, one, other, speed_noise):
    residual = residual_of(evidence, speed_noise)
    mean_one, mean_other, error = dense(evidence, one, other, speed_noise)
    assert residual.mean(one) == pytest.approx(mean_one, abs=1e-6)
    assert residual.mean(other) == pytest.approx(mean_other, abs=1e-6)
    assert residual.error(one, other) == pytest.approx(error, abs=1e-5)


@given(st.lists(pieces, max_size=8), settings_of_knobs, settings_of_knobs)
def test_between_a_setting_and_itself_there_is_no_error(evidence, one, other):
    residual = residual_of(evidence)
    assert residual.error(one, one) == pytest.approx(0.0, abs=1e-6)
    assert residual.error(one, other) == pytest.approx(residual.error(other, one), abs=1e-6)


def test_measured_settings_are_told_as_measured():
    ratios = {1: 0.3, 2: 0.1, 4: -0.05, 16: -0.2}
    evidence = [
        Evidence(knobs=replace(START, update_interval=s), log_ratio=r, noise=0.0, time=0)
        for s, r in ratios.items()
    ]
    residual = residual_of(evidence)
    for item in evidence:
        assert residual.mean(item.knobs) == pytest.approx(item.log_ratio, abs=0.01)
    assert residual.error(evidence[0].knobs, evidence[3].knobs) < 0.01


@given(evidence_lists, st.floats(-2.0, 2.0), settings_of_knobs, settings_of_knobs)
def test_an_error_that_all_share_decides_between_no_two(evidence, offset, one, other):
    residual = residual_of(evidence)
    moved = residual_of([replace(item, log_ratio=item.log_ratio + offset) for item in evidence])
    apart = residual.mean(one) - residual.mean(other)
    assert moved.mean(one) - moved.mean(other) == pytest.approx(apart, abs=1e-6)
    assert moved.error(one, other) == pytest.approx(residual.error(one, other), abs=1e-5)


@given(settings_of_knobs, st.floats(-0.5, 0.5), settings_of_knobs, settings_of_knobs)
def test_one_measured_setting_decides_between_no_two(measured, ratio, one, other):
    evidence = [Evidence(knobs=measured, log_ratio=ratio, noise=0.01, time=0)] * 3
    residual = residual_of(evidence)
    assert residual.mean(one) == pytest.approx(residual.mean(other), abs=1e-9)


def test_neighbours_are_told_apart_with_less_error_than_strangers():
    residual = residual_of([Evidence(knobs=START, log_ratio=0.1, noise=0.0, time=0)])
    near = residual.error(START, replace(START, update_interval=START.update_interval + 1))
    far = residual.error(START, replace(START, topk_ratio=0.5, update_interval=32))
    assert 0 < near < 0.5 * far
    assert far < math.sqrt(2) * STRUCTURE


def test_what_was_measured_together_is_told_apart_better_than_what_was_not():
    other = replace(START, update_interval=16)

    def error(time, other_time):
        evidence = [
            Evidence(knobs=START, log_ratio=0.0, noise=0.01, time=time),
            Evidence(knobs=other, log_ratio=0.0, noise=0.01, time=other_time),
        ]
        return residual_of(evidence).error(START, other)

    assert error(0, 0) == pytest.approx(error(20, 20))
    assert error(0, 0) < error(0, 4) < error(0, 24)


def test_a_machine_that_has_become_slower_for_all_settings_says_nothing_of_one():
    """The newer setting is as good as the older one, if the older one is slower by now too."""
    other = replace(START, update_interval=16)
    once = Evidence(knobs=START, log_ratio=0.0, noise=0.005, time=30)
    slow = [replace(once, knobs=knobs, log_ratio=0.05, time=1) for knobs in (other, START)]
    residual = residual_of([once, *slow])
    alone = residual_of([once, slow[0]])
    believed = residual.mean(other) - residual.mean(START)
    assert believed < 0.6 * (alone.mean(other) - alone.mean(START))


def test_before_anything_is_measured_the_prediction_stands():
    assert residual_of([]).mean(START) == 0.0
    assert residual_of([]).error(START, replace(START, update_interval=16)) > 0


def test_a_model_that_was_off_here_is_trusted_less_there():
    def error(ratio):
        known = [(1, 0.0), (4, ratio)]
        evidence = [
            Evidence(knobs=replace(START, update_interval=s), log_ratio=r, noise=0.0, time=0)
            for s, r in known
        ]
        return residual_of(evidence).error(START, replace(START, topk_ratio=0.5))

    assert error(0.5) > 2 * error(0.0)
