"""What selections cost and how fast they age, as reports show it."""

from __future__ import annotations

from collections import deque
from statistics import fmean, median

from zenflow.report import StepReport

_KEPT = 5
"""Number of selections that are remembered."""
_LEAST_STEPS = 20
"""Least number of steps between two selections from which a trend can be told."""


class SelectionWatch:
    """Follows reports from selection to selection.

    The first selection moves most important columns at once, later ones a few: it is left out.
    """

    def __init__(self) -> None:
        """Know nothing yet."""
        self._seconds: deque[float] = deque(maxlen=_KEPT)
        self._trends: deque[tuple[float, float]] = deque(maxlen=_KEPT)
        self._captured: list[float] = []
        self._has_selected = False
        self._waited = 0.0
        """Seconds waited in the selection that goes on."""
        self._steps_left = 0
        """Steps left of it, the next one included: rolling blocks each wait for their own end."""

    @property
    def seconds(self) -> float | None:
        """Of one selection, all its steps; None before the second one."""
        return median(self._seconds) if self._seconds else None

    @property
    def decay(self) -> float | None:
        """Captured share lost per step since the last selection, >= 0; None while unknown."""
        weight = sum(spread for _, spread in self._trends)
        if not weight:
            return None
        return max(0.0, -sum(product for product, _ in self._trends) / weight)

    def take(self, report: StepReport) -> None:
        """See a step."""
        waited = report.stalls.get("select", 0.0)
        if waited > 0 and not self._steps_left:
            self._close()
            self._steps_left = report.update_interval
        if not self._steps_left:
            self._captured.append(report.captured_energy)
            return
        self._waited += waited
        self._steps_left -= 1
        if not self._steps_left:
            if self._has_selected:
                self._seconds.append(self._waited)
            self._has_selected, self._waited = True, 0.0

    def interrupt(self) -> None:
        """Note that the knobs changed: what was captured before and after is not comparable."""
        self._has_selected = False
        self._captured = []
        self._waited, self._steps_left = 0.0, 0

    def _close(self) -> None:
        """Keep the trend between two selections: sums of products about the means."""
        captured, self._captured = self._captured, []
        count = len(captured)
        if not self._has_selected or count < _LEAST_STEPS:
            return
        middle, mean = (count - 1) / 2, fmean(captured)
        product = sum((i - middle) * (c - mean) for i, c in enumerate(captured))
        self._trends.append((product, count * (count * count - 1) / 12))
