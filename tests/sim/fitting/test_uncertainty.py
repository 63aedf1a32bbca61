"""Intervals come from the figures' own spreads, and from nothing else."""

import math

import numpy as np
import pytest

from sim.fitting.uncertainty import draws, interval_of
from sim.hardware.catalog import find_machine
from zenflow.errors import ConfigError

PROFILE = find_machine("dgx-a100-80", 1)


def test_draws_keep_mean_and_spread_of_a_figure():
    drawn = [p.link.d2h.value / PROFILE.link.d2h.value for p in draws(PROFILE, 3000, seed=1)]
    sigma = PROFILE.link.d2h.uncertainty
    assert np.mean(drawn) == pytest.approx(1.0, abs=4 * sigma / math.sqrt(3000))
    assert np.std(drawn) == pytest.approx(sigma, rel=0.1)


def test_shares_stay_shares():
    for drawn in draws(PROFILE, 300, seed=2):
        assert drawn.link.duplex.value <= 1
        assert drawn.device.matmul_efficiency.value <= 1
        assert 1 <= drawn.host.core_sharing.value <= 2


def test_the_interval_of_a_figure_is_its_own_distribution():
    found = interval_of(PROFILE, lambda p: p.link.d2h.value, count=2000, coverage=0.8, seed=3)
    sigma = math.sqrt(math.log1p(PROFILE.link.d2h.uncertainty**2))
    middle = PROFILE.link.d2h.value * math.exp(-(sigma**2) / 2)
    assert found.median == pytest.approx(middle, rel=0.01)
    assert found.high / found.low == pytest.approx(math.exp(2 * 1.2816 * sigma), rel=0.02)
    assert found.drivers[0] == ("link.d2h", pytest.approx(1.0))


def test_what_depends_on_nothing_has_no_width_and_no_drivers():
    found = interval_of(PROFILE, lambda p: 7.0, count=20)
    assert (found.low, found.median, found.high, found.drivers) == (7.0, 7.0, 7.0, ())


def test_what_is_left_out_widens_an_interval_about_the_same_middle():
    found = interval_of(PROFILE, lambda p: 7.0, count=20, left_out=0.2)
    assert found.median == pytest.approx(7.0)
    assert found.high / 7.0 == pytest.approx(math.exp(1.2816 * 0.2), rel=0.01)
    assert found.low * found.high == pytest.approx(49.0)
    with pytest.raises(ConfigError, match="left_out must be at least 0"):
        interval_of(PROFILE, lambda p: 7.0, left_out=-0.1)


def test_a_seed_repeats_and_another_differs():
    one, same, other = (
        [p.host.dram.value for p in draws(PROFILE, 3, seed=seed)] for seed in (5, 5, 6)
    )
    assert one == same != other


def test_wrong_settings_are_refused():
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        list(draws(PROFILE, 0, seed=0))
    with pytest.raises(ConfigError, match="coverage must be a share"):
        interval_of(PROFILE, lambda p: 1.0, coverage=1.0)
