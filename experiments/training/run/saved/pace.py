"""When a run is saved."""

from __future__ import annotations

import time
from collections.abc import Callable

from experiments.training.settings.training import TrainSettings

RETRY_SECONDS = 60.0
"""Most seconds from a save that failed to the next try."""
MOST_SHARE = 0.05
"""Share of the run's time that saves by the clock may take: a large state is saved less often."""


COMPACT_STEPS = 500
"""Steps between saves of compact host state where nothing is said."""


class SavePace:
    """Says when a save is due: every so many steps, every so many minutes, or both.

    A save has the host apply all gradients that wait, and compact state is rounded then. So that a
    run does not depend on the clock, compact state is saved by steps alone.
    """

    @classmethod
    def of(cls, settings: TrainSettings) -> SavePace:
        """Return the pace that a run's settings ask for."""
        if not settings.checkpoint:
            return cls(0, 0)
        if settings.is_compact:
            return cls(settings.save_every or COMPACT_STEPS, 0)
        return cls(settings.save_every, settings.save_minutes)

    def __init__(
        self, steps: int, minutes: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start counting; 0 is never."""
        self._steps = steps
        self._seconds = 60 * minutes or float("inf")
        self._clock = clock
        self._due = clock() + self._seconds

    def is_due_by_steps(self, step: int) -> bool:
        """Return whether to save after this step, whatever the clock says."""
        return bool(self._steps) and step % self._steps == 0

    def is_due(self, step: int) -> bool:
        """Return whether to save after this step."""
        return self.is_due_by_steps(step) or self.is_due_by_clock

    @property
    def is_due_by_clock(self) -> bool:
        """Whether to save now, whatever the step is."""
        return self._clock() >= self._due

    def saved(self, took: float) -> None:
        """Count from now on.

        Args:
            took: Seconds that the save took.
        """
        self._due = self._clock() + max(self._seconds, took / MOST_SHARE - took)

    def failed(self) -> None:
        """Let the next try come soon: a disk may have been cleared by then."""
        self._due = self._clock() + min(self._seconds, RETRY_SECONDS)
