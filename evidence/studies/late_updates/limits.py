"""Limits of learning rate times curvature and noise, by rule: its linear map on a quadratic.

The loss is h/2 (a w)^2 with a unit vector a, spread evenly over one group of columns for each
phase. All columns are deferred, the worst case. A second moment that has settled is a constant
factor of the learning rate, so a rule is a linear map that repeats every S steps. The rule is
stable where no eigenvalue of the map of S steps is larger than 1.

*Noise* is the variance of the masters once random gradients, independent from step to step, have
been added for long: the sum of squares of what one such gradient does, in the mean over the step
of the window in which it comes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from evidence.studies.late_updates.rules import SETTLED, Rule

Array = NDArray[np.float64]

BETA1 = 0.9
_SETTLING = 400
"""Number of steps after which a gradient is forgotten, times the curvature where that is small."""
_GROWTH = 1e-6
"""Excess of an eigenvalue over 1 that is no rounding."""
_COARSE, _FINE = 1.1, 1.01
"""Factors between the values tried, and between the last two."""
_LEAST, _MOST = 0.01, 60.0
"""Values between which a limit is looked for. AdamW's own is 38."""


def adamw_limit(beta1: float = BETA1) -> float:
    """Return AdamW's own limit, 2 (1 + beta1) / (1 - beta1) (Cohen et al., arXiv 2207.14484).

    >>> round(adamw_limit(), 6)
    38.0
    """
    return 2 * (1 + beta1) / (1 - beta1)


class _Quadratic:
    """All weights under one rule, as columns of a matrix: one for each start."""

    def __init__(self, rule: Rule, beta1: float) -> None:
        self.rule, self.beta1 = rule, beta1
        groups = rule.interval if rule.rolling else 1
        self.phases = np.arange(1, groups + 1) if rule.rolling else np.array([rule.interval])
        self.along = groups**-0.5
        # All groups see the same gradient, so one moment and one sum stand for all.
        ends = np.cumsum([groups, groups, groups, 1])
        parts = np.split(np.eye(3 * groups + 2), ends)
        self.seen, self.master, self.upload, self.moment, self.sum = parts

    def state(self) -> Array:
        """Return everything as one matrix: the map of the steps taken so far."""
        return np.concatenate([self.seen, self.master, self.upload, self.moment, self.sum])

    def step(self, t: int, curvature: float, added: Array | float = 0.0) -> None:
        """Take step t at a learning rate of 1, with something added to the gradient."""
        rule, beta1 = self.rule, self.beta1
        gradient = curvature * self.along**2 * self.seen.sum(0, keepdims=True) + added
        due, lands = self._in_turn(t), self._in_turn(t - rule.lag)
        if rule.lag:
            self.seen = np.where(lands, self.upload, self.seen)
        if rule.kind == "late" and rule.fresh != "none":
            self.seen = self.seen - self._shares(t) * gradient
        self.sum = (self.sum if rule.kind == "published" else 0.0 * self.sum) + gradient
        if rule.kind != "published":
            self.moment = beta1 * self.moment + (1 - beta1) * gradient
        if rule.kind == "late":
            self.master = self.master - self.moment
        self._close(due)
        if not rule.lag:
            self.seen = np.where(due, self.upload, self.seen)

    def _in_turn(self, t: int) -> NDArray[np.bool_]:
        """Return the groups whose turn in the window step t is."""
        turns: NDArray[np.bool_] = (t - self.phases) % self.rule.interval == 0
        return turns[:, None]

    def _shares(self, t: int) -> Array:
        """Return by how much of its learning rate each group takes the fresh gradient at once."""
        left = (self.phases - t) % self.rule.interval + self.rule.lag
        return np.array([[self.rule.share(self.beta1, int(uses), SETTLED)] for uses in left])

    def _close(self, due: NDArray[np.bool_]) -> None:
        """Move masters whose window ends, and fill their uploads."""
        rule, interval = self.rule, self.rule.interval
        if rule.kind == "late":
            lead = rule.lead(self.beta1, SETTLED)
        elif rule.kind == "former":
            self.master = self.master - np.where(due, interval * self.moment, 0.0)
            lead = rule.lead_share * (rule.lag + (interval - 1) / 2)
        else:
            mean = self.beta1 * self.moment + (1 - self.beta1) * self.sum / interval
            self.moment = np.where(due, mean, self.moment)  # aligned: a single group
            self.master = self.master - np.where(due, self.moment, 0.0)
            self.sum = np.where(due, 0.0, self.sum)
            lead = 0.0
        upload = self.master - lead * self.moment
        self.upload = np.where(due, upload, self.upload)


def growth(rule: Rule, curvature: float, beta1: float = BETA1) -> float:
    """Return the largest eigenvalue, in size, of the map of one window, per step.

    Args:
        rule: Rule of the deferred columns.
        curvature: Learning rate times preconditioned curvature.
        beta1: Decay of the first moment.
    """
    model = _Quadratic(rule, beta1)
    for t in range(1, model.rule.interval + 1):
        model.step(t, curvature)
    largest = float(np.abs(np.linalg.eigvals(model.state())).max())
    return float(largest ** (1 / model.rule.interval))


def noise(rule: Rule, curvature: float, beta1: float = BETA1) -> float:
    """Return the variance of the masters over AdamW's; infinite where the rule is unstable.

    Args:
        rule: Rule of the deferred columns.
        curvature: Learning rate times preconditioned curvature.
        beta1: Decay of the first moment.
    """
    if growth(rule, curvature, beta1) > 1 + _GROWTH:
        return float("inf")
    plain = replace(rule, interval=1, lag=0)
    return _squares(rule, curvature, beta1) / _squares(plain, curvature, beta1)


def _squares(rule: Rule, curvature: float, beta1: float) -> float:
    """Return the sum of squares of what a gradient does to a master, in the mean over its step."""
    model, interval = _Quadratic(rule, beta1), rule.interval
    for name in ("seen", "master", "upload", "moment", "sum"):
        start = getattr(model, name)
        setattr(model, name, np.zeros((len(start), interval)))
    total, steps = 0.0, math.ceil(_SETTLING / min(curvature, 1.0))
    for t in range(1, steps + interval):
        added = (np.arange(interval) == t - 1).astype(np.float64)
        model.step(t, curvature, added)
        total += float((model.master[0] ** 2).sum())
    return total / interval


def limit(rule: Rule, beta1: float = BETA1) -> float:
    """Return the least learning rate times curvature at which the rule is unstable, to 1%.

    Raises:
        ValueError: It is unstable below every value that is tried.
    """

    def stable(value: float) -> bool:
        return growth(rule, value, beta1) <= 1 + _GROWTH

    return first_failure(stable)


def first_failure(stable: Callable[[float], bool]) -> float:
    """Return about where a condition first fails between the least and the most that is tried.

    Raises:
        ValueError: It fails at the least.
    """
    value = _LEAST
    if not stable(value):
        raise ValueError(f"the rule is unstable at {value:g} already: it can't train anything")
    while value < _MOST and stable(value * _COARSE):
        value *= _COARSE
    low, high = value, value * _COARSE
    while high / low > _FINE:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if stable(middle) else (low, middle)
    return low
