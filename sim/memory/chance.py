"""Chance that a predicted need of device memory fits.

A device holds the predicted bytes times a factor that nobody knows before: fragments of the
allocator, workspaces of kernels, what a framework keeps longer. The factor is taken as log-normal
with median 1. Published peaks, and set-ups that ran or failed, say how wide it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import NormalDist

SPREAD = 0.20
"""Standard deviation of the factor's logarithm, from the published cases (`zenflow study
published`)."""
LIKELY = 0.9
"""Least chance to fit at which a setting is recommended."""
_LEAST, _MOST, _STEPS = 0.02, 1.0, 99
_FLOOR = 1e-12
"""Least likelihood of a case, however far off it is."""


def chance_to_fit(need: float, room: float, spread: float = SPREAD) -> float:
    """Return the chance that a predicted need fits a room, both in bytes, in (0, 1).

    Examples:
        >>> round(chance_to_fit(need=70e9, room=80e9), 2)
        0.75
    """
    return NormalDist(sigma=spread).cdf(math.log(room / need))


def likely_need(room: float, chance: float = LIKELY, spread: float = SPREAD) -> float:
    """Return the largest predicted need, bytes, that fits a room with a chance in (0, 1)."""
    return room * math.exp(-NormalDist(sigma=spread).inv_cdf(chance))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOutcome:
    """A published case with its prediction."""

    predicted: float
    """Predicted bytes, counted as the peak counts where one is published."""
    room: float
    """Memory of the device, bytes."""
    ran: bool
    """Whether the published run fitted, rather than ran out of memory."""
    peak: float | None = None
    """Measured peak, bytes; None where only the outcome is published."""

    def likelihood(self, spread: float) -> float:
        """Return the likelihood of what was published, for a spread of the factor."""
        if self.peak is not None:
            return NormalDist(sigma=spread).pdf(math.log(self.peak / self.predicted))
        chance = chance_to_fit(self.predicted, self.room, spread)
        return max(_FLOOR, chance if self.ran else 1.0 - chance)


def fit_spread(outcomes: Iterable[MemoryOutcome]) -> float:
    """Return the spread with which the published cases are likeliest, to 0.01.

    Without any it is `SPREAD`.
    """
    cases = list(outcomes)
    if not cases:
        return SPREAD
    spreads = [_LEAST + (_MOST - _LEAST) * step / (_STEPS - 1) for step in range(_STEPS)]

    def log_likelihood(spread: float) -> float:
        return sum(math.log(max(_FLOOR, case.likelihood(spread))) for case in cases)

    likeliest: float = max(spreads, key=log_likelihood)
    return round(likeliest, 2)
