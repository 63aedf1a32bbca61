"""Upload gate: starts uploads when weights are free, and waits for those that must land."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zenflow.device.base import Arrival
from zenflow.lanes.completion import Completion, unique, wait_all
from zenflow.lanes.copies import Copy

if TYPE_CHECKING:
    from zenflow.columns.layout import Block, PendingUpload
    from zenflow.device.base import AbstractDevice, Gather, LateGradient
    from zenflow.device.stalls import StallClock
    from zenflow.lanes.copies import CopyLane
    from zenflow.rule.calendar import WindowCalendar


@dataclass(eq=False, repr=False)
class UploadGate:
    """Starts uploads when weights are free, and waits for those that must have landed."""

    device: AbstractDevice
    lane: CopyLane
    stalls: StallClock
    calendar: WindowCalendar
    wait_timeout: float
    gather: Gather | None

    def lands(self, block: Block, step: int) -> bool:
        """Whether the block's update in flight lands in this step.

        An update lands at its landing step, and at the latest when the block's next window ends.
        """
        return block.pending is not None and (
            block.pending.land_step == step or self.calendar.is_due(block.index, step)
        )

    def is_awaited(self, block: Block, step: int) -> bool:
        """Whether the block's upload is to begin in this step, and has not begun."""
        update = block.pending
        return update is not None and update.uploaded is None and self.lands(block, step)

    def start_uploads(
        self,
        blocks: Iterable[Block],
        mark: Any,
        step: int,
        late: Callable[[Block], LateGradient | None] = lambda _: None,
    ) -> None:
        """Queue the uploads that land in this step, for blocks whose weights are not in use.

        Args:
            blocks: Any blocks; blocks without a landing update are skipped.
            mark: The device's position after the last use of the weights.
            step: The step under way.
            late: Function that returns the gradient whose fresh step a block's weights still need.
        """
        self.start_parts(
            [
                (block, 0, block.shape.num_deferred, late(block))
                for block in blocks
                if self.is_awaited(block, step)
            ],
            mark,
            step,
        )

    def start_parts(
        self,
        parts: Sequence[tuple[Block, int, int, LateGradient | None]],
        mark: Any,
        step: int,
    ) -> list[Completion]:
        """Queue the upload of some rows of updates that land in this step.

        Args:
            parts: Block, first row, row after the last, and the gradient whose fresh step these
                rows still need. A block's parts come in order, the last one last.
            mark: The device's position after the last use of the weights.
            step: The step under way.

        Returns:
            The copy's completion, if there is anything to copy.
        """
        if not parts:
            return []  # most buckets of most steps
        uploaded = Completion(f"the upload of step {step} (h2d)")
        arrivals, computed = [], []
        for block, low, high, late in parts:
            update = block.pending
            assert update is not None
            update.uploaded = uploaded
            computed.append(update.computed)
            if update.buffer is not None:
                update.buffer.uploads.append(uploaded)
            values, columns = update.values, block.deferred_columns
            if high - low < block.shape.num_deferred:  # a view costs as much as an operation
                values, columns = values[low:high], columns[low:high]
            arrivals.append(Arrival(values, columns, block.split.weight(), late))
        self.lane.submit(
            Copy(
                run=lambda: self.device.unpack(arrivals, mark, self.gather),
                after=unique(computed),
                completion=uploaded,
                num_bytes=sum(arrival.values.nbytes for arrival in arrivals),
                step=step,
            )
        )
        return [uploaded]

    def take_landings(self, blocks: Iterable[Block], step: int) -> list[PendingUpload]:
        """Take the updates that land in this step out of flight; their uploads have started."""
        landed = []
        for block in blocks:
            update = block.pending
            if update is not None and self.lands(block, step):
                assert update.uploaded is not None, "an update that lands was never let up"
                landed.append(update)
                update.end()
        return landed

    def wait(self, updates: Sequence[PendingUpload]) -> None:
        """Let the next forward see these updates; a wait for one that is late is a stall."""
        if not updates:
            return
        with self.stalls.waiting("d2h"):
            wait_all(unique(c for update in updates for c in update.copied), self.wait_timeout)
        with self.stalls.waiting("host"):
            wait_all(unique(update.computed for update in updates), self.wait_timeout)
        with self.stalls.waiting("h2d"):
            self.order_after_uploads(updates)

    def order_after_uploads(self, updates: Iterable[PendingUpload]) -> None:
        """Order compute that is launched from now on after these updates' uploads."""
        for uploaded in unique(update.uploaded for update in updates):
            uploaded.wait_launched(self.wait_timeout)
            self.device.order_after(uploaded)
