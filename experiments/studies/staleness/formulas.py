"""Formulas for what late updates cost, and their constants from measured costs.

A *cost* is further steps for each one that counts: 1/efficiency - 1. It grows with the windows'
length S, the updates' lag, and rho, the share of gradient energy in deferred columns.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]

_RELATIVE_LAGS = (0.0, 32.0)
_EXPONENTS = (0.5, 4.0)
_STRETCHES = (0.0, 8.0)
"""Where d, p and a stretch are looked for."""
_GRID_POINTS = 25
_ZOOMS = 8


class Measured(NamedTuple):
    """One setting and what it cost."""

    interval: int
    """S, in steps."""
    lag: int
    """Number of steps by which updates come late."""
    rho: float
    """Share of gradient energy in deferred columns, in [0, 1]."""
    cost: float


@dataclass(frozen=True, slots=True)
class Linear:
    """rho (a (S - 1) + b lag): the form of the convergence bound."""

    a: float
    b: float

    def cost(self, interval: int, lag: int, rho: float, stretch: float = 1.0) -> float:
        """Return the cost, as ``Power.cost`` does."""
        return rho * (self.a * stretch * (interval - 1) + self.b * lag)

    @classmethod
    def fitted(cls, measured: Sequence[Measured]) -> Linear:
        """Return the constants, none below 0, with the least squared error; see ``residuals``."""
        points = _Points(measured)
        terms = (points.intervals - 1, points.lags)
        both = np.stack([points.weights * points.rhos * term for term in terms], axis=1)
        a, b = np.linalg.lstsq(both, points.weights * points.costs, rcond=None)[0]
        if a >= 0 and b >= 0:
            return cls(float(a), float(b))
        # The best of two constants is on an edge: one alone, the other 0.
        (a, a_error), (b, b_error) = (points.scaled(term) for term in terms)
        return cls(a, 0.0) if a_error <= b_error else cls(0.0, b)


@dataclass(frozen=True, slots=True)
class Power:
    """rho c (S - 1 + d lag)^p: one staleness, to a power."""

    c: float
    d: float
    p: float

    def cost(self, interval: int, lag: int, rho: float, stretch: float = 1.0) -> float:
        """Return the cost of windows of ``interval`` steps that land ``lag`` steps late.

        Args:
            interval: S, in steps.
            lag: In steps.
            rho: Share of gradient energy in deferred columns, in [0, 1].
            stretch: How many times S - 1 counts; see ``stretch_of``.
        """
        return float(rho * self.c * (stretch * (interval - 1) + self.d * lag) ** self.p)

    @classmethod
    def fitted(cls, groups: Sequence[Sequence[Measured]]) -> list[Power]:
        """Return each group's formula, all of one shape (d and p), none of a constant below 0.

        The summed squared error is the least; see ``residuals``.
        """
        points = [_Points(measured) for measured in groups]

        def scaled(d: float, p: float) -> list[tuple[float, float]]:
            return [own.scaled((own.intervals - 1 + d * own.lags) ** p) for own in points]

        def total_error(d: float, p: float) -> float:
            return sum(error for _, error in scaled(d, p))

        d, p = _least(total_error, _RELATIVE_LAGS, _EXPONENTS)
        return [cls(factor, d, p) for factor, _ in scaled(d, p)]


Formula: TypeAlias = Linear | Power


def stretch_of(formulas: Sequence[Power], groups: Sequence[Sequence[Measured]]) -> float:
    """Return how many times S - 1 counts in settings that the formulas were not fitted to.

    Windows that end together move all deferred weights at once, so each step of them counts more.

    Args:
        formulas: Of each group.
        groups: Settings of the other kind, those of one learning rate together.
    """

    def error(stretch: float) -> float:
        return sum(
            left**2
            for formula, measured in zip(formulas, groups, strict=True)
            for left in residuals(formula, measured, stretch)
        )

    return _least(error, _STRETCHES)[0]


def residuals(formula: Formula, measured: Sequence[Measured], stretch: float = 1.0) -> list[float]:
    """Return how far costs lie above the formula's, each over 1 + the cost.

    That is the relative error of a predicted efficiency, to first order: a setting that is slow
    many times over decides no more than one that is a little slow.
    """
    return [
        (cost - formula.cost(interval, lag, rho, stretch)) / (1 + cost)
        for interval, lag, rho, cost in measured
    ]


class _Points:
    """Measured settings as arrays."""

    def __init__(self, measured: Sequence[Measured]) -> None:
        """Take the columns apart."""
        columns = np.array(measured, dtype=np.float64).T
        self.intervals, self.lags, self.rhos, self.costs = columns
        self.weights = 1 / (1 + self.costs)

    def scaled(self, terms: Array) -> tuple[float, float]:
        """Return the factor, not below 0, that brings terms nearest to the costs, and the error.

        Args:
            terms: One number for each setting, to be multiplied by rho.
        """
        weighted = self.weights * self.rhos * terms
        costs = self.weights * self.costs
        norm = float(weighted @ weighted)
        factor = max(0.0, float(weighted @ costs) / norm) if norm else 0.0
        return factor, float(np.sum((costs - factor * weighted) ** 2))


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
