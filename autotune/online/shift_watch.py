"""Shift watch: whether steps with the same knobs take another time from some step on.

A machine changes at one step, whatever the tuner is at. The steps about that moment have the same
knobs, so that their times need no model and no second stretch to be compared.
"""

from __future__ import annotations

import math

from autotune.model.stretch import robust_mean

_NEWEST, _OLDEST = 8, 48
"""Number of steps that show a new level, and most steps before them that show the old one."""
_SIGMAS = 5.0
LEAST_SHIFT = 0.1
"""Least change of the logarithm of a step's time that counts as a shift.

A machine's own speed wanders by less within some dozen steps."""


class ShiftWatch:
    """Compares the newest steps with those before them.

    Examples:
        Steps take half as long again from the 21st on:

        >>> watch = ShiftWatch()
        >>> [step for step in range(1, 41) if watch.take(1.0 if step <= 20 else 1.5)]
        [25]
        >>> watch.before
        1.0
    """

    def __init__(self, period: int = 1) -> None:
        """Watch steps that are alike every ``period`` steps."""
        self.before: float | None = None
        """Seconds of a step before the first shift since this was None; None without a shift."""
        self._period = period
        self._newest = math.ceil(_NEWEST / period) * period
        self._seconds: list[float] = []

    @property
    def num_since(self) -> int:
        """Number of steps since the last shift, right after it was seen."""
        return len(self._seconds)

    def take(self, seconds: float) -> bool:
        """See a step's seconds; return whether there was a shift just before the newest steps."""
        self._seconds = [*self._seconds, seconds][-(_OLDEST + self._newest) :]
        old, new = self._seconds[: -self._newest], self._seconds[-self._newest :]
        if len(old) < self._newest:
            return False
        (before, noise), (after, new_noise) = (robust_mean(s, self._period) for s in (old, new))
        # A few steps may look quiet by luck: they are as noisy as those before.
        new_noise = max(new_noise, noise * math.sqrt(len(old) / len(new)))
        limit = max(LEAST_SHIFT, _SIGMAS * math.hypot(noise, new_noise))
        if abs(math.log(after / before)) <= limit:
            return False
        first = 0
        if self._period == 1:  # the newest may begin with some of before
            first = next(i for i, s in enumerate(new) if abs(s - after) < abs(s - before))
        self._seconds = new[first:]
        self.before = self.before or before  # what goes back to it was a burst
        return True
