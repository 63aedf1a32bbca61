"""Agreement of ranks: all act after the same step, though one alone knows that it is due."""

from __future__ import annotations

import signal

from experiments.training.parts.ranks.ranks import Gathered, Ranks
from experiments.training.run.saved.pace import SavePace
from experiments.training.run.stop import StopRequest


def stop_together(ranks: Ranks, stop: StopRequest) -> bool:
    """Tell all ranks of a request that any of them has had, and return whether there is one.

    Waits for all of them: for use between runs. `Agreement` is for use between steps.
    """
    signals = ranks.collect(stop.signal)
    stop.signal = max((number for number in signals if number is not None), default=None)
    return stop.requested


class Agreement:
    """Whether to stop or to save now, asked after every step.

    A run of one process acts at once. Several ranks tell each other after a step what they know,
    and act on it after the next one: by then it has arrived, and nobody has waited for it.
    """

    def __init__(self, ranks: Ranks, stop: StopRequest, pace: SavePace) -> None:
        """Agree on the stop that any rank is asked for, and on the first rank's clock."""
        self._ranks = ranks
        self._stop = stop
        self._pace = pace
        self._told: Gathered | None = None
        self._stops = self._saves = False

    @property
    def stops(self) -> bool:
        """Whether the run ends here."""
        return self._stops if self._ranks.are_several else self._stop.requested

    def saves(self, step: int) -> bool:
        """Return whether to save after this step."""
        if not self._ranks.are_several:
            return self._pace.is_due(step)
        return self._saves or self._pace.is_due_by_steps(step)

    def ask(self) -> None:
        """Exchange what ranks know; called by all of them after every step."""
        if not self._ranks.are_several:
            return
        arrived = self._told
        number = 0 if self._stop.signal is None else int(self._stop.signal)
        self._told = self._ranks.gather([number, self._pace.is_due_by_clock])
        if arrived is None:
            return
        found = arrived.get()
        self._saves = bool(found[0][1])
        number = int(max(row[0] for row in found))
        if number:
            self._stops, self._stop.signal = True, signal.Signals(number)

    def end(self) -> None:
        """Wait for what is under way: nothing may be, when ranks part."""
        if self._told is not None:
            self._told.get()
