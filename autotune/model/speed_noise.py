"""Speed noise: how a machine's speed moves by itself, and settings compared in spite of it.

What a machine's other work does from minute to minute slows all settings alike. Stretches measured
soon after one another share it, so that they tell two settings apart which stretches far apart
can't. It is taken as a stationary process whose correlation falls exponentially with time
(Ornstein-Uhlenbeck); settings' means are then estimated by generalised least squares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, pvariance

import numpy as np
from numpy.typing import NDArray

from autotune.model.stretch import Stretch
from zenflow.knobs import Knobs

LEAST_NOISE = 0.005
_PRIOR_DEVIATION, _PRIOR_REPEATS = 0.03, 2.0
"""Standard deviation of a machine's log speed before any was seen, and the repeats it is worth."""
_CORRELATION_STRETCHES = 8.0
"""Number of stretches after which the speed's correlation has fallen to 1/e."""

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SpeedNoise:
    """Noise of log step times; the defaults are what is known before there are any."""

    seen: float = 0.0
    """Standard deviation of what stretches share with those about them, as far as it was seen."""
    white: float = 0.0
    """Standard deviation from one stretch to the next at the same knobs: what they don't share."""
    num_repeats: int = 0
    """Number of stretches at knobs that had been measured before."""

    @property
    def deviation(self) -> float:
        """``seen``, mixed with what is believed of any machine while it was seldom looked at."""
        squares = _PRIOR_REPEATS * _PRIOR_DEVIATION**2 + self.num_repeats * self.seen**2
        return math.sqrt(squares / (_PRIOR_REPEATS + self.num_repeats))

    @classmethod
    def of(cls, stretches: Sequence[Stretch]) -> SpeedNoise:
        """Return what repeated measurements at the same knobs show.

        Neighbours differ by what is white, all of a setting by both (von Neumann's ratio).
        """
        groups: dict[Knobs, list[Stretch]] = {}
        for stretch in stretches:
            groups.setdefault(stretch.knobs, []).append(stretch)
        num_repeats = sum(len(group) - 1 for group in groups.values())
        if not num_repeats:
            return cls()
        logs = [[math.log(s.step_seconds) for s in group] for group in groups.values()]
        total = sum(len(group) * pvariance(group) for group in logs) / num_repeats
        steps = [
            math.log(later.step_seconds / earlier.step_seconds)
            for group in groups.values()
            for earlier, later in pairwise(group)
            if later.index == earlier.index + 1
        ]
        white = fmean(step * step for step in steps) / 2 if steps else 0.0
        return cls(math.sqrt(max(0.0, total - white)), math.sqrt(white), num_repeats)

    @property
    def between_neighbours(self) -> float:
        """Standard error of the difference between two stretches, one right after the other."""
        shared = math.exp(-1.0 / _CORRELATION_STRETCHES)
        white = max(self.white, LEAST_NOISE)
        return math.sqrt(2.0 * (white**2 + self.deviation**2 * (1.0 - shared)))

    def covariances(self, stretches: Sequence[Stretch]) -> tuple[Array, Array]:
        """Return those of log step times, (N, N): of what wanders, and of each one's own noise."""
        times = np.array([stretch.index for stretch in stretches], float)
        apart = np.abs(times[:, None] - times[None, :])
        own = [max(stretch.noise, self.white, LEAST_NOISE) ** 2 for stretch in stretches]
        return self.deviation**2 * np.exp(-apart / _CORRELATION_STRETCHES), np.diag(own)


def paired_gain(
    stretches: Sequence[Stretch], worth: Callable[[Stretch], float], one: Knobs, other: Knobs
) -> tuple[float, float]:
    """Return by how much the worth of one setting exceeds another's, and its standard error.

    ``worth`` is the log of what is compared, as noisy as the log of a step's time. Stretches of
    other settings tell what wandered.
    """
    shared, own = SpeedNoise.of(stretches).covariances(stretches)
    settings = list(dict.fromkeys(stretch.knobs for stretch in stretches))
    design = np.array([[s.knobs == knobs for knobs in settings] for s in stretches], float)
    weighted = np.linalg.solve(shared + own, design)
    sides = np.array([(knobs == one) - float(knobs == other) for knobs in settings])
    spread = np.linalg.solve(design.T @ weighted, sides)
    values = np.array([worth(stretch) for stretch in stretches])
    return float(spread @ (weighted.T @ values)), math.sqrt(float(sides @ spread))
