"""Intervals come from the spreads of figures, and of what is left out where that is given."""

import math
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest

from sim.fitting.uncertainty import draws, interval_of, threads_are_open
from sim.hardware.catalog import find_machine
from sim.simulate import Strategy
from zenflow.errors import ConfigError

PROFILE = find_machine("dgx-a100-80", 1)


def test_draws_keep_mean_and_spread_of_a_figure():
    drawn = [p.link.d2h.value / PROFILE.link.d2h.value for p in draws(PROFILE, 3000, seed=1)]
    sigma = PROFILE.link.d2h.uncertainty
    assert np.mean(drawn) == pytest.approx(1.0, abs=4 * sigma / math.sqrt(3000))
    assert np.std(drawn) == pytest.approx(sigma, rel=0.1)


def test_of_few_draws_one_is_in_each_equal_part_of_a_figures_distribution():
    quantity = PROFILE.link.d2h
    sigma = math.sqrt(math.log1p(quantity.uncertainty**2))
    normals = [
        (math.log(p.link.d2h.value / quantity.value) + sigma**2 / 2) / sigma
        for p in draws(PROFILE, 20, seed=4)
    ]
    assert sorted(int(20 * NormalDist().cdf(z)) for z in normals) == list(range(20))


def test_a_figures_draws_do_not_depend_on_which_others_there_are():
    alone, several = PROFILE, find_machine("dgx-a100-80", 8, num_hosts=2)
    assert len(several.quantities()) > len(alone.quantities())
    pairs = zip(draws(alone, 10, seed=5), draws(several, 10, seed=5), strict=True)
    assert all(a.link.d2h.value == b.link.d2h.value for a, b in pairs)
    first, second = ([p.link.d2h.value for p in draws(alone, 10, seed=n)] for n in (5, 6))
    assert sorted(first) != sorted(second)


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


def test_threads_that_a_launcher_sets_are_drawn_from_one_to_a_share_of_the_cores():
    machine = find_machine("dgx-a100-80", 8)
    drawn = list(draws(machine, 400, seed=7, draws_threads=True))
    counts = [profile.host_threads for profile in drawn]
    share = machine.threads_per_device
    assert (min(counts), max(counts)) == (1, share)
    # As many below the geometric mean of both ends as above.
    assert sum(count**2 < share for count in counts) == pytest.approx(200, abs=40)
    # No other figure's draw depends on it.
    plain = draws(machine, 400, seed=7)
    assert [p.quantities() for p in drawn] == [p.quantities() for p in plain]


@pytest.mark.parametrize(
    ("strategy", "devices", "threads", "is_open"),
    [
        ("zero3_offload", 8, None, True),
        ("fsdp2_offload", 8, None, True),
        ("zero3_offload", 1, None, False),  # one process has all cores
        ("zero3_offload", 8, 4, False),  # stated
        ("zenflow", 8, None, False),  # the engine's threads are not OpenMP's
    ],
)
def test_threads_are_open_where_a_launcher_decides(strategy, devices, threads, is_open):
    machine = replace(find_machine("dgx-a100-80", devices), host_threads=threads)
    assert threads_are_open(machine, Strategy.of(strategy)) is is_open


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
