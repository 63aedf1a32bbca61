"""Speed noise: changes of a machine's own speed, and settings compared in spite of them.

A machine's other work slows all settings alike, and changes from minute to minute. Stretches
measured soon after one another share its effect, so that they tell two settings apart which
stretches far apart can't. The noise is taken as a stationary process whose correlation falls
exponentially with time (Ornstein-Uhlenbeck); settings' means are then estimated by generalised
least squares.
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
    """Noise of log step times; the defaults stand until repeats have been measured.

    See `paired_gain`.
    """

    seen: float = 0.0
    """Standard deviation of the part that neighbouring stretches share, as far as it was seen."""
    white: float = 0.0
    """Standard deviation of the part that neighbouring stretches at one setting don't share."""
    num_repeats: int = 0
    """Number of stretches at knobs that had been measured before."""

    @property
    def deviation(self) -> float:
        """Value of ``seen``, mixed with a general belief while there are few repeats."""
        squares = _PRIOR_REPEATS * _PRIOR_DEVIATION**2 + self.num_repeats * self.seen**2
        return math.sqrt(squares / (_PRIOR_REPEATS + self.num_repeats))

    @classmethod
    def of(cls, stretches: Sequence[Stretch]) -> SpeedNoise:
        """Return the noise that repeated measurements at one setting show.

        Neighbouring stretches differ by white noise alone, all stretches of a setting by both
        kinds (von Neumann's ratio).
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
        """Return the covariances of log step times, (N, N): shared noise, and each one's own."""
        times = np.array([stretch.index for stretch in stretches], float)
        apart = np.abs(times[:, None] - times[None, :])
        own = [max(stretch.noise, self.white, LEAST_NOISE) ** 2 for stretch in stretches]
        return self.deviation**2 * np.exp(-apart / _CORRELATION_STRETCHES), np.diag(own)


def paired_gain(
    stretches: Sequence[Stretch], worth: Callable[[Stretch], float], one: Knobs, other: Knobs
) -> tuple[float, float]:
    """Return the worth of one setting less another's, and its standard error.

    ``worth`` is the log of what is compared, as noisy as the log of a step's time. Stretches of
    other settings show how the machine's speed moved.

    Examples:
        Two settings take turns on a machine that slows down. The second takes 10 % less time.

        >>> from zenflow.config import ZenFlowConfig
        >>> old, new = (Knobs.of(ZenFlowConfig(update_interval=s)) for s in (1, 4))
        >>> times = [(old, 1.0), (new, 0.9), (old, 1.02), (new, 0.92), (old, 1.04), (new, 0.94)]
        >>> stretches = [
        ...     Stretch(index=i, last_step=i, knobs=knobs, step_seconds=seconds, noise=0.01,
        ...             stall_seconds=0.0, rho=0.8)
        ...     for i, (knobs, seconds) in enumerate(times)]
        >>> gain, error = paired_gain(stretches, lambda s: -math.log(s.step_seconds), new, old)
        >>> round(gain, 2), round(error, 2)
        (0.11, 0.01)
    """
    shared, own = SpeedNoise.of(stretches).covariances(stretches)
    settings = list(dict.fromkeys(stretch.knobs for stretch in stretches))
    design = np.array([[s.knobs == knobs for knobs in settings] for s in stretches], float)
    weighted = np.linalg.solve(shared + own, design)
    sides = np.array([(knobs == one) - float(knobs == other) for knobs in settings])
    spread = np.linalg.solve(design.T @ weighted, sides)
    values = np.array([worth(stretch) for stretch in stretches])
    return float(spread @ (weighted.T @ values)), math.sqrt(float(sides @ spread))
