"""Measured stretches: a step's time in the long run, whatever single steps do."""

from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.model.stretch import robust_mean

seconds = st.floats(1e-3, 10.0)


@given(seconds, st.integers(1, 8), st.integers(3, 6))
def test_even_steps_are_exact_and_free_of_noise(value, interval, windows):
    mean, noise = robust_mean([value] * (interval * windows), interval)
    assert mean == pytest.approx(value)
    assert noise == pytest.approx(0.0, abs=1e-9)


@given(st.lists(seconds, min_size=2, max_size=8), st.integers(3, 6))
def test_whole_windows_are_averaged_wherever_they_begin(window, count):
    """A window's long step may stand anywhere: a stretch does not begin with a window."""
    mean, noise = robust_mean(window * count, len(window))
    assert mean == pytest.approx(fmean(window))
    assert noise == pytest.approx(0.0, abs=1e-6)


@given(st.integers(0, 11), st.floats(3.0, 1e4), st.sampled_from([1, 2, 4]))
def test_a_spike_hardly_counts(at, size, interval):
    measured = [1.0] * 12
    measured[at] = size
    mean, _ = robust_mean(measured, interval)
    assert mean == pytest.approx(1.0, rel=1e-6)


@given(st.integers(0, 15), st.floats(20.0, 1e4))
def test_a_spike_beside_long_steps_hardly_counts(at, size):
    measured = [1.0, 1.0, 1.0, 5.0] * 4
    measured[at] = size
    mean, _ = robust_mean(measured, 4)
    assert mean == pytest.approx(2.0, rel=1e-6)


def test_a_spike_among_too_few_windows_counts_as_three_steps():
    measured = [1.0] * 12
    measured[7] = 1e4
    assert robust_mean(measured, 6)[0] == pytest.approx(14 / 12)


def test_what_spreads_more_is_noisier_and_longer_stretches_are_less():
    few, many = [1.0, 1.1, 0.9, 1.05, 0.95] * 3, [1.0, 1.1, 0.9, 1.05, 0.95] * 12
    wide = [1.0, 1.4, 0.6, 1.2, 0.8] * 3
    assert 0 < robust_mean(few, 1)[1] < robust_mean(wide, 1)[1]
    assert robust_mean(many, 1)[1] == pytest.approx(robust_mean(few, 1)[1] / 2)


def test_noise_is_relative():
    steps = [1.0, 1.1, 0.9, 1.05, 0.95] * 3
    scaled = [1e-3 * value for value in steps]
    assert robust_mean(scaled, 1)[1] == pytest.approx(robust_mean(steps, 1)[1])


def test_less_than_a_window_is_the_mean_of_what_there_is():
    assert robust_mean([1.0, 2.0], 8)[0] == pytest.approx(1.5)
