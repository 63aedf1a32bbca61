"""Fits find the constants that made the measurements, and never a negative one."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.fitting.fit import Sample, fit_constants, least_squares
from zenflow.errors import ConfigError


def samples(constants, rows, noise=None):
    found = []
    for index, counts in enumerate(rows):
        seconds = sum(constants[name] * count for name, count in counts.items())
        factor = 1.0 if noise is None else noise[index]
        found.append(Sample(counts, seconds * factor, f"row {index}"))
    return found


ROWS = [
    {"call": 1, "byte": size, "flop": flop}
    for size in (1e3, 1e6, 1e9)
    for flop in (1e6, 1e9, 1e12)
]


def test_exact_measurements_give_the_constants_back():
    truth = {"call": 1e-5, "byte": 1e-10, "flop": 1e-12}
    fit = fit_constants(samples(truth, ROWS))
    assert fit.constants == pytest.approx(truth)
    assert fit.worst_error < 1e-9


def test_a_constant_that_plays_no_part_is_0_and_its_rate_the_bound():
    fit = fit_constants(samples({"call": 1e-5, "byte": 1e-10, "flop": 0.0}, ROWS))
    assert fit.constants["flop"] == pytest.approx(0.0, abs=1e-20)
    assert fit.rate("byte", 1e15) == pytest.approx(1e10)
    assert fit.rate("flop", 1e15) == pytest.approx(1e15)


def test_small_measurements_count_as_much_as_large_ones():
    # One constant, two measurements that disagree by a factor of 4: in seconds the large one would
    # decide; in relative error the small one is off by more where the large one is met.
    two = [Sample({"x": 1.0}, 1.0), Sample({"x": 1000.0}, 4000.0)]
    assert fit_constants(two).constants["x"] < 2.0


def test_residuals_are_predicted_over_measured():
    fit = fit_constants([Sample({"x": 1.0}, 1.0, "a"), Sample({"x": 1.0}, 1.1, "b")])
    x = fit.constants["x"]
    assert fit.residuals == pytest.approx({"a": x - 1, "b": x / 1.1 - 1})
    assert fit.median_error == pytest.approx(np.mean([abs(x - 1), abs(x / 1.1 - 1)]))


ENTRIES = st.floats(-3, 3).map(lambda number: round(number, 3))  # 1e-12 beside 1 can't be solved


@given(st.lists(ENTRIES, min_size=12, max_size=12), st.lists(ENTRIES, min_size=4, max_size=4))
def test_least_squares_are_the_best_that_is_not_negative(entries, target):
    matrix, wanted = np.array(entries).reshape(4, 3), np.array(target)
    found = least_squares(matrix, wanted)
    assert (found >= 0).all()

    def error(x):
        return float(np.sum((matrix @ x - wanted) ** 2))

    best = error(found)
    for index in range(3):  # no small step along an axis helps: the problem is convex
        for step in (1e-3, -1e-3):
            other = found.copy()
            other[index] = max(0.0, other[index] + step)
            assert error(other) >= best - 1e-9 * max(1.0, best)


@pytest.mark.parametrize("bad", [[], [Sample({"x": 1.0}, 0.0)], [Sample({"x": 1.0}, math.nan)]])
def test_samples_that_say_nothing_are_refused(bad):
    with pytest.raises(ConfigError, match="measure longer"):
        fit_constants(bad)
