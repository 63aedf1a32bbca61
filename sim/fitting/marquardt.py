"""Marquardt: constants whose errors' squares are least, by Levenberg and Marquardt's method.

The method is Gauss and Newton's with a damping (Marquardt 1963, "An algorithm for least-squares
estimation of nonlinear parameters"). Slopes come from differences, since errors are those of
simulations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

SWEEPS = 8
"""Largest number of sweeps; each takes all slopes anew."""
_DIFFERENCE = 0.04
"""Change of a constant that gives a slope: wider than a simulation's roughness."""
_LONGEST_MOVE = 1.5
"""Largest change of a constant in one sweep: slopes tell little of what is farther away."""
_ENOUGH = 1e-3
"""Share of the error by which a sweep must lessen it for another to follow."""
_DAMPINGS = (1e-3, 1e-2, 1e-1, 1.0, 10.0)
"""Dampings that are tried in turn until a move lessens the error."""


@dataclass(frozen=True, slots=True)
class Minimum:
    """Constants with the least squared errors that were found. See `least_errors`."""

    at: Array
    """Constants that were found, (n,)."""
    errors: Array
    """Errors with these constants, (m,)."""
    slopes: Array
    """Slopes of the errors before the last move, (m, n)."""
    before: float
    """Norm of the errors at the start."""


def least_errors(
    errors: Callable[[Array], Array],
    low: Array,
    high: Array,
    *,
    on_sweep: Callable[[int, float], None] | None = None,
) -> Minimum:
    """Return constants with the least sum of squared errors, from 0 on.

    Constants are meant to be logarithms of factors: a change by 1 is large.

    Args:
        errors: Returns the errors, (m,), with some constants, (n,).
        low: Least value of each constant, (n,), at most 0.
        high: Largest value of each, at least 0.
        on_sweep: Told after each move of all constants: its number, and the errors' norm.

    Examples:
        >>> found = least_errors(lambda at: np.exp(at) - 2.0, np.array([-9.0]), np.array([9.0]))
        >>> round(float(np.exp(found.at[0])), 3)
        2.0
    """
    at = np.zeros(len(low))
    off = errors(at)
    before = size(off)
    for sweep in range(SWEEPS):
        former = size(off)
        slopes = _slopes(errors, at, off, _DIFFERENCE * (-1) ** sweep)
        at, off = _better(errors, at, off, slopes, low, high)
        if on_sweep is not None:
            on_sweep(sweep + 1, size(off))
        if size(off) > (1 - _ENOUGH) * former:
            break
    return Minimum(at, off, slopes, before)


def size(errors: Array) -> float:
    """Return the norm of errors."""
    return float(np.linalg.norm(errors))


def _slopes(errors: Callable[[Array], Array], at: Array, off: Array, difference: float) -> Array:
    """Return the slopes of the errors, a row for each error and a column for each constant."""
    moves = difference * np.eye(len(at))
    return np.stack([(errors(at + move) - off) / difference for move in moves], axis=1)


def _better(
    errors: Callable[[Array], Array], at: Array, off: Array, slopes: Array, low: Array, high: Array
) -> tuple[Array, Array]:
    """Return constants and errors after a move that lessens these, or both as they are.

    A constant at a bound that it would pass stays: the others' move would count on its own.
    """
    downhill = -slopes.T @ off
    free = ~((at <= low) & (downhill < 0) | (at >= high) & (downhill > 0))
    square = slopes[:, free].T @ slopes[:, free]
    scale = np.diag(np.diag(square) + 1e-6 * square.max(initial=0.0))
    for damping in _DAMPINGS:
        move = np.zeros(len(at))
        move[free] = np.linalg.solve(square + damping * scale, downhill[free])
        tried = np.clip(at + np.clip(move, -_LONGEST_MOVE, _LONGEST_MOVE), low, high)
        found = errors(tried)
        if size(found) < size(off):
            return tried, found
    return at, off
