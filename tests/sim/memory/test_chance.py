"""The chance that predicted memory fits, and the spread that published cases give it."""

import math
from random import Random
from statistics import NormalDist

import pytest

from sim.memory.chance import SPREAD, MemoryOutcome, chance_to_fit, fit_spread


def test_what_is_as_large_as_the_device_fits_every_other_time():
    assert chance_to_fit(24.0, 24.0) == pytest.approx(0.5)


def test_one_spread_of_room_is_one_standard_deviation():
    assert chance_to_fit(10.0, 10.0 * math.exp(SPREAD)) == pytest.approx(NormalDist().cdf(1.0))
    assert chance_to_fit(10.0 * math.exp(0.3), 10.0, 0.3) == pytest.approx(NormalDist().cdf(-1.0))


@pytest.mark.parametrize("shows", ["peaks", "outcomes"])
def test_the_spread_of_made_up_cases_is_found(shows):
    random = Random(shows)
    cases = []
    for _ in range(4000):
        predicted, true = random.uniform(0.5, 1.5), random.gauss(0.0, 0.2)
        used = predicted * math.exp(true)
        ran = used <= 1.0
        peak = used if shows == "peaks" else None
        cases.append(MemoryOutcome(predicted=predicted, room=1.0, ran=ran, peak=peak))
    assert fit_spread(cases) == pytest.approx(0.2, abs=0.011)


def test_without_cases_it_is_that_of_the_published_ones():
    assert fit_spread([]) == SPREAD


def test_a_case_that_is_far_off_counts_and_does_not_break_the_fit():
    near = [MemoryOutcome(predicted=1.0, room=2.0, ran=True, peak=1.1)] * 5
    far = MemoryOutcome(predicted=1.0, room=100.0, ran=False)
    assert fit_spread(near) < fit_spread([*near, far]) <= 1.0
