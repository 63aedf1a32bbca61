"""Residual: remaining error of the refitted simulator, learnt where it was measured.

A Gaussian process on the logarithm of measured over predicted step time, over the knobs. Near a
measured setting the error is known; far from it the prediction stands, with the error that the
model has shown elsewhere. Questions are always about a difference between two settings, whose
error is small for neighbours even where the model is off as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autotune.model.speed_noise import Array, SpeedNoise
from autotune.model.stretch import Stretch
from zenflow.knobs import Knobs

_STRUCTURE = 0.06
"""Standard deviation of the refitted simulator's log error before any is seen.

Validation on this engine found a median of 3 % and a 90th percentile of 8 %."""
_STRUCTURE_WEIGHT = 4.0
"""Number of settings that this belief counts as."""
_OFFSET = 0.3
"""Standard deviation of an error that all settings share: it never decides between two."""


class Residual:
    """Posterior of the log errors: a Gaussian process over the knobs.

    Examples:
        A prediction was 10 % too short where it was measured, and is taken to be so nearby, too.

        >>> from zenflow.config import ZenFlowConfig
        >>> here, near, far = (Knobs.of(ZenFlowConfig(update_interval=s)) for s in (4, 5, 64))
        >>> seen = Stretch(index=0, last_step=20, knobs=here, step_seconds=1.1, noise=0.001,
        ...                stall_seconds=0.0, rho=0.8)
        >>> residual = Residual([seen], [math.log(1.1)], SpeedNoise())
        >>> round(residual.mean(near), 2)
        0.1
        >>> residual.error(near, here) < residual.error(far, here)
        True
    """

    def __init__(
        self, stretches: Sequence[Stretch], log_ratios: Sequence[float], speed_noise: SpeedNoise
    ) -> None:
        """Condition on stretches, with the log of measured over predicted step time of each."""
        self._knobs = [stretch.knobs for stretch in stretches]
        self._structure = _structure(self._knobs, log_ratios, speed_noise.seen)
        if stretches:
            self._mean = float(np.median(log_ratios))
            shared, own = speed_noise.covariances(stretches)
            gram = self._covariance(self._knobs, self._knobs) + shared + own
            self._factor: Array = np.linalg.cholesky(gram).astype(float)
            half = np.linalg.solve(self._factor, np.array(log_ratios) - self._mean)
            self._solved: Array = np.linalg.solve(self._factor.T, half)

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
    """Return the distance of two settings: at 1 their errors are independent."""
    here, there = _features([one, other])
    return float(np.linalg.norm(here - there))


def _structure(settings: Sequence[Knobs], log_ratios: Sequence[float], seen: float) -> float:
    """Return the standard deviation that the settings measured so far suggest.

    Some of what they differ by is the machine's, which was faster for one than for another.
    """
    by_setting: dict[Knobs, list[float]] = {}
    for knobs, ratio in zip(settings, log_ratios, strict=True):
        by_setting.setdefault(knobs, []).append(ratio)
    centres = [float(np.median(values)) for values in by_setting.values()]
    if len(centres) < 2:
        return _STRUCTURE
    squares = len(centres) * max(0.0, float(np.var(centres, ddof=1)) - seen**2)
    prior = _STRUCTURE_WEIGHT * _STRUCTURE**2
    return math.sqrt((prior + squares) / (_STRUCTURE_WEIGHT + len(centres)))


def _features(knobs: Sequence[Knobs]) -> Array:
    """Return coordinates in which settings at a distance of 1 have errors of their own, (N, 2)."""
    rows = [
        (math.log2(item.update_interval) / 2.0, math.log(max(item.topk_ratio, 1e-3)) / 1.5)
        for item in knobs
    ]
    return np.array(rows, float).reshape(len(rows), 2)
