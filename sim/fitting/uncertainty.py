"""Uncertainty: the interval of a prediction whose inputs are themselves not exact.

Each quantity of a profile is drawn from a log-normal about its value with its relative spread, all
independent of one another, and the step is predicted again. The interval says how far off such
errors can put a prediction. Draws are a Latin hypercube (McKay et al., Technometrics 1979): of n
draws of a quantity, one is in each n-th part of its distribution, so that few draws suffice. The
model's own error is a factor on it, log-normal too, whose spread is given
(`sim.fitting.left_out`).

The number of a process's threads is drawn where nobody states it. With several processes a
launcher sets it: `torchrun` to 1, Accelerate's and each recipe's own code to a share of the cores,
DeepSpeed's to nothing, which is all cores for every process. An optimizer that has one thread may
take several times as long.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from sim.fitting.left_out import LeftOut
from sim.hardware.profile import HardwareProfile
from sim.hardware.quantity import bounded
from sim.simulate import Strategy
from zenflow.errors import ConfigError

_NODES = 25
"""Equally likely values that stand for a log-normal factor: less noise than a draw has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Quantiles of a predicted number over draws of a profile. See `interval_of`."""

    low: float
    """Lower end, in the unit of the predicted number."""
    median: float
    """Median over the draws."""
    high: float
    """Upper end, in the unit of the predicted number."""
    coverage: float
    """Share of draws between low and high."""
    drivers: tuple[tuple[str, float], ...]
    """Quantities that move the prediction most: name, and rank correlation with it."""


def threads_are_open(profile: HardwareProfile, strategy: Strategy) -> bool:
    """Return whether a launcher decides how many threads an optimizer on the host has.

    Args:
        profile: The machine.
        strategy: What runs. The engine's threads are its own, not OpenMP's.

    Examples:
        >>> from sim.hardware.catalog import find_machine
        >>> offload = Strategy.of("zero3_offload")
        >>> [threads_are_open(find_machine("hgx-h100", count), offload) for count in (1, 8)]
        [False, True]
    """
    is_several = profile.num_devices > 1 and not profile.device.is_cpu
    return strategy.config is None and profile.host_threads is None and is_several


def draws(
    profile: HardwareProfile, count: int, *, seed: int, draws_threads: bool = False
) -> Iterator[HardwareProfile]:
    """Yield profiles with quantities drawn from their distributions.

    A quantity's draws depend on its name, the count and the seed alone.

    Args:
        profile: The machine.
        count: Number of profiles.
        seed: Of the draws.
        draws_threads: Whether to draw the threads of each device's process too, from 1 to its
            share of the cores, with equal chances for equal ratios.

    Raises:
        ConfigError: The count is not positive.

    See `interval_of`.
    """
    if count < 1:
        raise ConfigError(f"the number of draws must be at least 1, got {count}")
    quantities, normal = profile.quantities(), NormalDist()
    shares = {name: _shares(name, count, seed) for name in quantities}
    threads = _shares("host_threads", count, seed)
    for index in range(count):
        values = {}
        for name, quantity in quantities.items():
            sigma = math.sqrt(math.log1p(quantity.uncertainty**2))
            z = normal.inv_cdf(shares[name][index])
            values[name] = bounded(name, quantity.value * math.exp(sigma * z - sigma**2 / 2))
        made = profile.with_values(values)
        if draws_threads:
            made = replace(made, host_threads=round(profile.threads_per_device ** threads[index]))
        yield made


def _shares(name: str, count: int, seed: int) -> list[float]:
    """Return numbers in (0, 1), in random order, one in each of so many equal parts."""
    generator = np.random.default_rng([seed, *name.encode()])
    shares = (generator.permutation(count) + generator.uniform(1e-6, 1, count)) / count
    return [float(share) for share in shares]


def interval_of(
    profile: HardwareProfile,
    predict: Callable[[HardwareProfile], float],
    *,
    count: int = 100,
    coverage: float = 0.8,
    seed: int = 0,
    left_out: float | LeftOut = 0.0,
    draws_threads: bool = False,
) -> Interval:
    """Return the interval of a prediction over draws of the profile.

    Args:
        profile: The machine.
        predict: Returns a number, for example a step's seconds, on a machine.
        count: Draws.
        coverage: Share of them inside the interval.
        seed: Of the draws.
        left_out: Term for what the model leaves out: of a time, or the standard deviation of its
            logarithm.
        draws_threads: As in `draws`; `threads_are_open` says where.

    Raises:
        ConfigError: A setting breaks its rule.

    Examples:
        How many GB/s reach the host, if the link's bandwidth is a data sheet's?

        >>> from sim.hardware.catalog import find_machine
        >>> machine = find_machine("hgx-h100", 1)
        >>> found = interval_of(machine, lambda drawn: drawn.link.d2h.value / 1e9, count=50)
        >>> round(found.low), round(found.median), round(found.high)
        (53, 55, 57)
        >>> found.drivers[0][0]
        'link.d2h'
    """
    term = left_out if isinstance(left_out, LeftOut) else LeftOut(left_out, left_out)
    if not 0 < coverage < 1:
        raise ConfigError(f"coverage must be a share in (0, 1), got {coverage}")
    drawn = list(draws(profile, count, seed=seed, draws_threads=draws_threads))
    found = np.array([predict(item) for item in drawn])
    factors = np.array([term.factor(z) for z in _normal_nodes()])
    low, middle, high = np.quantile(
        np.outer(found, factors), [(1 - coverage) / 2, 0.5, (1 + coverage) / 2]
    )
    return Interval(
        low=float(low),
        median=float(middle),
        high=float(high),
        coverage=coverage,
        drivers=_drivers(drawn, found),
    )


def _normal_nodes() -> list[float]:
    """Return equally likely values of a standard normal."""
    normal = NormalDist()
    return [normal.inv_cdf((index + 0.5) / _NODES) for index in range(_NODES)]


def _drivers(drawn: list[HardwareProfile], found: np.ndarray) -> tuple[tuple[str, float], ...]:
    """Return the five quantities whose ranks go with the prediction's most."""
    if len(drawn) < 3 or np.ptp(found) == 0:
        return ()
    names = list(drawn[0].quantities())
    values = np.array([[f.value for f in item.quantities().values()] for item in drawn])
    target = _ranks(found)
    correlations = []
    for index, name in enumerate(names):
        column = values[:, index]
        if np.ptp(column) > 0:
            correlations.append((name, float(np.corrcoef(_ranks(column), target)[0, 1])))
    return tuple(sorted(correlations, key=lambda item: -abs(item[1]))[:5])


def _ranks(values: np.ndarray) -> np.ndarray:
    return np.argsort(np.argsort(values)).astype(float)
