"""Starved: a record of times in which the host's work waits for a drive."""

from __future__ import annotations

from bisect import bisect_right


class Starved:
    """Times in which users waited for extents, and none was in use."""

    def __init__(self) -> None:
        """Start with none."""
        self._begins: list[float] = []
        self._ends: list[float] = []
        self._before: list[float] = []
        """Seconds before each of the times that are over."""
        self._since: float | None = None
        self._total = 0.0

    def run(self, now: float, *, is_running: bool) -> None:
        """Run or stand from now on."""
        if is_running == (self._since is not None):
            return
        if is_running:
            self._since = now
            return
        assert self._since is not None
        self._begins.append(self._since)
        self._before.append(self._total)
        self._ends.append(now)
        self._total += now - self._since
        self._since = None

    def seconds(self, start: float, end: float) -> float:
        """Return the seconds between two moments, the later one not in the future."""
        return self._until(end) - self._until(start)

    def _until(self, moment: float) -> float:
        if self._since is not None and moment > self._since:
            return self._total + moment - self._since
        place = bisect_right(self._begins, moment) - 1
        if place < 0:
            return 0.0
        return self._before[place] + min(moment, self._ends[place]) - self._begins[place]
