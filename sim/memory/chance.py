"""How likely a predicted need of device memory fits.

A device holds what is predicted times a factor that nobody knows before: fragments of the
allocator, workspaces of kernels, what a framework keeps longer. Its logarithm is taken as normal
around nothing. Published peaks, and set-ups that ran or failed, say how wide it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import NormalDist

SPREAD = 0.21
"""Standard deviation of the factor's logarithm, from the published cases (`zenflow study
published`)."""
LIKELY = 0.9
"""Least chance to fit at which a setting is recommended."""
_LEAST, _MOST, _STEPS = 0.02, 1.0, 99
_FLOOR = 1e-12
"""Least likelihood of a case, however far off it is."""


def chance_to_fit(need: float, room: float, spread: float = SPREAD) -> float:
    """Return how likely so many predicted bytes fit into so many, in (0, 1)."""
    return NormalDist(sigma=spread).cdf(math.log(room / need))


def likely_need(room: float, chance: float = LIKELY, spread: float = SPREAD) -> float:
    """Return the most predicted bytes that fit into so many with a chance in (0, 1)."""
    return room * math.exp(-NormalDist(sigma=spread).inv_cdf(chance))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOutcome:
    """A published case beside its prediction."""

    predicted: float
    """Predicted bytes, of what the peak counts where there is one."""
    room: float
    """Bytes of the device."""
    ran: bool
    """Whether it ran."""
    peak: float | None = None
    """Measured bytes; None where only the outcome is published."""

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
