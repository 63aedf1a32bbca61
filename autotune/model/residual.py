"""Residual: what the refitted simulator still gets wrong, learnt where it was measured.

A Gaussian process on the logarithm of measured over predicted step time, over the knobs. Near a
measured setting the error is known; far from it the prediction stands, with the error that the
model has shown elsewhere. What is asked is always a difference between two settings, whose error
is small for neighbours even where the model is off as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotune.model.speed_noise import LEAST_NOISE, SpeedNoise
from autotune.space import effective_lag
from zenflow.knobs import Knobs

_STRUCTURE = 0.06
"""Standard deviation of the refitted simulator's log error before any is seen.

Validation on this engine found a median of 3 % and a 90th percentile of 8 %."""
_STRUCTURE_WEIGHT = 4.0
"""Number of settings that this belief counts as."""
_OFFSET = 0.3
"""Standard deviation of an error that all settings share: it never decides between two."""

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One measured stretch beside its prediction."""

    knobs: Knobs
    """The setting."""
    log_ratio: float
    """Log of measured over predicted step time."""
    noise: float
    """Standard error of that, beside what the machine's speed does meanwhile."""
    time: int
    """Time in stretches."""


class Residual:
    """The posterior over log errors."""

    def __init__(
        self, evidence: Sequence[Evidence], speed_noise: SpeedNoise | None = None
    ) -> None:
        """Condition on what was measured.

        Args:
            evidence: All that is known.
            speed_noise: How the machine's speed moves; None is what is believed of any.
        """
        speed_noise = speed_noise or SpeedNoise()
        self._knobs = [item.knobs for item in evidence]
        values = np.array([item.log_ratio for item in evidence])
        self._structure = _structure(evidence, speed_noise.seen)
        self._mean = float(np.median(values)) if len(values) else 0.0
        if evidence:
            noise = np.array([max(item.noise, LEAST_NOISE) ** 2 for item in evidence])
            shared = speed_noise.covariance(np.array([item.time for item in evidence], float))
            gram = self._covariance(self._knobs, self._knobs) + shared + np.diag(noise)
            self._factor: Array = np.linalg.cholesky(gram).astype(float)
            self._solved = _solve(self._factor, values - self._mean)

    def mean(self, knobs: Knobs) -> float:
        """Return the expected log error at a setting."""
        if not self._knobs:
            return 0.0
        return self._mean + float(self._covariance([knobs], self._knobs)[0] @ self._solved)

    def error(self, one: Knobs, other: Knobs) -> float:
        """Return the standard deviation of the difference between two settings' log errors."""
        pair = [one, other]
        covariance = self._covariance(pair, pair)
        if self._knobs:
            cross = self._covariance(self._knobs, pair)
            half = np.linalg.solve(self._factor, cross)
            covariance = covariance - half.T @ half
        variance = covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1]
        return math.sqrt(max(0.0, float(variance)))

    def _covariance(self, ones: Sequence[Knobs], others: Sequence[Knobs]) -> Array:
        left, right = _features(ones), _features(others)
        squared = ((left[:, None, :] - right[None, :, :]) ** 2).sum(axis=2)
        found: Array = self._structure**2 * np.exp(-squared / 2) + _OFFSET**2
        return found


def distance(one: Knobs, other: Knobs) -> float:
    """Return how far apart two settings are: at 1 they have errors of their own."""
    here, there = _features([one, other])
    return float(np.linalg.norm(here - there))


def _structure(evidence: Sequence[Evidence], seen: float) -> float:
    """Return the standard deviation that the settings measured so far suggest.

    Some of what they differ by is the machine's, which was faster for one than for another.
    """
    by_setting: dict[Knobs, list[float]] = {}
    for item in evidence:
        by_setting.setdefault(item.knobs, []).append(item.log_ratio)
    centres = [float(np.median(values)) for values in by_setting.values()]
    if len(centres) < 2:
        return _STRUCTURE
    squares = len(centres) * max(0.0, float(np.var(centres, ddof=1)) - seen**2)
    prior = _STRUCTURE_WEIGHT * _STRUCTURE**2
    return math.sqrt((prior + squares) / (_STRUCTURE_WEIGHT + len(centres)))


def _features(knobs: Sequence[Knobs]) -> Array:
    """Return coordinates in which settings at a distance of 1 have errors of their own, (N, 4)."""
    rows = []
    for item in knobs:
        rows.append(
            (
                math.log2(item.update_interval) / 2.0,
                math.log2(max(effective_lag(item), 1)) / 1.5,
                math.log(max(item.topk_ratio, 1e-3)) / 1.5,
                1.0 * item.rolling,
            )
        )
    return np.array(rows, float).reshape(len(rows), 4)


def _solve(factor: Array, values: Array) -> Array:
    found: Array = np.linalg.solve(factor.T, np.linalg.solve(factor, values))
    return found
