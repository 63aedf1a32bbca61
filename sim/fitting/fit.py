"""Fit: a profile's constants from measured seconds, each a sum of counts times a constant.

Constants are seconds for each unit of something counted (a FLOP, a byte, a task), so fits are
linear and none may be negative. What is minimised is the relative error, since a small model's
milliseconds count as much as a large one's seconds.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zenflow.errors import ConfigError

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement: counts of each constant, and seconds. See `fit_constants`."""

    counts: Mapping[str, float]
    """Number of times that each constant was paid."""
    seconds: float
    """Measured seconds of the sum."""
    label: str = ""
    """Name of the measurement, for tables."""


class AbstractFit(ABC):
    """A fit with the errors that it leaves. See `fit_constants`."""

    __slots__ = ()

    residuals: Mapping[str, float]
    """Relative error of each measurement: predicted over measured minus 1."""

    @property
    def median_error(self) -> float:
        """Median absolute relative error."""
        return float(np.median([abs(error) for error in self.residuals.values()]))

    @property
    def worst_error(self) -> float:
        """Largest absolute relative error."""
        return max(abs(error) for error in self.residuals.values())


@dataclass(frozen=True, slots=True)
class Fit(AbstractFit):
    """Fitted constants, and the error of each measurement that they leave.

    See `fit_constants`.
    """

    constants: Mapping[str, float]
    """Seconds of each constant; 0 where the measurements show none."""
    residuals: Mapping[str, float]
    """Relative error of each sample: predicted over measured minus 1."""

    def rate(self, name: str, most: float) -> float:
        """Return units per second; ``most`` where the constant is too small to be seen."""
        seconds = self.constants[name]
        return min(most, 1.0 / seconds) if seconds > 0 else most


def fit_constants(samples: Sequence[Sample]) -> Fit:
    """Return the constants >= 0 with the least squared relative error.

    Equivalent to ``scipy.optimize.nnls(counts / seconds, ones)``. Exact, by trying every set of
    constants that are not zero: there are few. Of two sets that fit equally well the smaller
    counts.

    Raises:
        ConfigError: There is no sample, or one took no time.

    Examples:
        >>> samples = [Sample(counts={"byte": 1e9, "copy": 1}, seconds=0.11),
        ...            Sample(counts={"byte": 2e9, "copy": 1}, seconds=0.21)]
        >>> {name: round(value, 12) for name, value in fit_constants(samples).constants.items()}
        {'byte': 1e-10, 'copy': 0.01}
    """
    if not samples or any(not sample.seconds > 0 for sample in samples):
        raise ConfigError("a fit needs samples, each of more than 0 s: measure longer")
    names = list(dict.fromkeys(name for sample in samples for name in sample.counts))
    counts = np.array([[s.counts.get(name, 0.0) for name in names] for s in samples])
    seconds = np.array([sample.seconds for sample in samples])
    values = least_squares(counts / seconds[:, None], np.ones(len(samples)))
    predicted = counts @ values
    return Fit(
        constants=dict(zip(names, (float(v) for v in values), strict=True)),
        residuals={
            sample.label or str(index): float(predicted[index] / seconds[index] - 1.0)
            for index, sample in enumerate(samples)
        },
    )


def least_squares(matrix: Array, target: Array) -> Array:
    """Return x >= 0 with the least |matrix x - target|^2, for a handful of columns."""
    count = matrix.shape[1]
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    scaled = matrix / scale
    best, least = np.zeros(count), math.inf
    for size in range(1, count + 1):
        for chosen in itertools.combinations(range(count), size):
            values = np.linalg.lstsq(scaled[:, chosen], target, rcond=None)[0]
            if (values < 0).any():
                continue
            error = float(np.sum((scaled[:, chosen] @ values - target) ** 2))
            if error < least * (1 - 1e-9):
                least = error
                best = np.zeros(count)
                best[list(chosen)] = values
    found: Array = best / scale
    return found
