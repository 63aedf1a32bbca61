"""Loans: extents in memory, each for one user; and a clock of users who have none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from zenflow.drive.extents import Extent, RowState
from zenflow.lanes.completion import Completion

if TYPE_CHECKING:
    from torch import Tensor

    from zenflow.drive.lane import DriveLane

Urgency = tuple[int, ...]
"""Sort key of requests: the least is read first."""


class Loan:
    """An extent in memory, for one user.

    Attributes:
        extent: The extent.
        there: Completion of its reading.
        step: Number of the step that asks for it.
    """

    __slots__ = ("_lane", "extent", "memory", "step", "there", "urgency", "weights_only")

    def __init__(
        self, lane: DriveLane, extent: Extent, urgency: Urgency, step: int, *, weights_only: bool
    ) -> None:
        """Describe a request; `ask` makes it."""
        self._lane = lane
        self.extent = extent
        self.urgency = urgency
        self.step = step
        self.weights_only = weights_only
        self.there = Completion(f"extent {extent.index} of the drive")
        self.memory: Tensor | None = None

    def ask(self) -> None:
        """Let the extent be read; `there` ends when it is in memory."""
        self._lane._ask(self)

    @property
    def state(self) -> RowState:
        """State of the extent's rows, until `give_back`."""
        assert self.memory is not None, "the extent is not in memory"
        return self.extent.state(self.memory)

    def give_back(self, *, changed: bool) -> None:
        """End the loan; a changed extent is written behind the caller's back."""
        self._lane._take_back(self, changed=changed)

    @contextmanager
    def used(self, *, changes: bool) -> Iterator[RowState]:
        """Use the extent in a `with` block, and give it back; unchanged if the block fails."""
        is_whole = False
        try:
            yield self.state
            is_whole = True
        finally:
            self.give_back(changed=changes and is_whole)


class StarvedClock:
    """Clock that runs while somebody is starved."""

    def __init__(self) -> None:
        """Stand at 0."""
        self._seconds = 0.0
        self._since: float | None = None

    def run(self, now: float, is_running: bool) -> None:
        """Run or stand from now on."""
        self._seconds = self.seconds(now)
        self._since = now if is_running else None

    def seconds(self, now: float) -> float:
        """Return the seconds so far."""
        return self._seconds + (0.0 if self._since is None else now - self._since)
