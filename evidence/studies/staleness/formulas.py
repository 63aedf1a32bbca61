"""The constants of the tuner's formula for what late updates cost, from measured costs.

A *cost* is further steps for each one that counts: 1/efficiency - 1. It grows with the windows'
length S, with rho, the share of gradient energy in deferred columns, and with the learning rate.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from autotune.efficiency import DelayCost

Array: TypeAlias = NDArray[np.float64]

_POWERS, _RATE_POWERS = (0.5, 6.0), (0.0, 6.0)
"""Ranges in which the two exponents are sought."""
_GRID_POINTS = 25
_ZOOMS = 8


class Measured(NamedTuple):
    """One setting and what it cost."""

    interval: int
    """Window length S in steps."""
    rate: float
    """Learning rate over AdamW's best."""
    rho: float
    """Share of gradient energy in deferred columns, in [0, 1]."""
    cost: float


def fitted(measured: Sequence[Measured]) -> DelayCost:
    """Return the formula with the least squared error; see ``residuals``.

    Where nothing costs anything the interval is infinite.
    """
    intervals, rates, rhos, costs = np.array(measured, dtype=np.float64).T
    weights = 1 / (1 + costs)

    def scaled(power: float, rate_power: float) -> tuple[float, float]:
        """Return the factor, not below 0, with the least error, and that error."""
        terms = weights * rhos * intervals**power * rates**rate_power
        factor = max(0.0, float(terms @ (weights * costs)) / float(terms @ terms))
        return factor, float(np.sum((weights * costs - factor * terms) ** 2))

    power, rate_power = _least(lambda *at: scaled(*at)[1], _POWERS, _RATE_POWERS)
    factor, _ = scaled(power, rate_power)
    interval = factor ** (-1 / power) if factor else math.inf
    return DelayCost(interval=interval, power=power, rate_power=rate_power)


def residuals(formula: DelayCost, measured: Sequence[Measured]) -> list[float]:
    """Return how far costs lie above the formula's, each over 1 + the cost.

    That is the relative error of a predicted efficiency, to first order: a setting that is slow
    many times over decides no more than one that is a little slow.
    """
    return [
        (cost - rho * formula.cost(interval, rate)) / (1 + cost)
        for interval, rate, rho, cost in measured
    ]


def _least(error: Callable[..., float], *ranges: tuple[float, float]) -> tuple[float, ...]:
    """Return where the error is least in the ranges: on a grid, then on finer ones around it."""
    best: tuple[float, ...] = ()
    searched = list(ranges)
    for _ in range(_ZOOMS):
        axes = [np.linspace(low, high, _GRID_POINTS).tolist() for low, high in searched]
        points: Iterator[tuple[float, ...]] = itertools.product(*axes)
        best = min(points, key=lambda point: error(*point))
        reach = [2 * (high - low) / (_GRID_POINTS - 1) for low, high in searched]
        searched = [
            (max(low, at - r), min(high, at + r))
            for (low, high), at, r in zip(ranges, best, reach, strict=True)
        ]
    return best
