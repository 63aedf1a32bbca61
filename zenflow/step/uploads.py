"""The upload gate: lets updates up when weights are free, waits for what must have landed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zenflow.device.base import Arrival
from zenflow.lanes.completion import Completion, unique, wait_all
from zenflow.lanes.copies import Copy

if TYPE_CHECKING:
    from zenflow.columns.layout import Block, Landing
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

        It does at its landing step, and at the latest when the block's next window ends.
        """
        return block.landing is not None and (
            block.landing.land_step == step or self.calendar.is_due(block.index, step)
        )

    def is_awaited(self, block: Block, step: int) -> bool:
        """Whether the block has an upload that is to begin in this step, and has not."""
        landing = block.landing
        return landing is not None and landing.uploaded is None and self.lands(block, step)

    def start_uploads(
        self,
        blocks: Iterable[Block],
        mark: Any,
        step: int,
        late: Callable[[Block], LateGradient | None] = lambda _: None,
    ) -> None:
        """Queue the upload of what lands in this step, from blocks whose weights are not in use.

        Args:
            blocks: Any blocks; those with nothing to land are passed over.
            mark: The device's position after the last use of the weights.
            step: The step under way.
            late: Returns the gradient that a block's weights still have to be moved by.
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
        """Queue the upload of some rows of what lands in this step.

        Args:
            parts: Block, first row, row after the last, and the gradient that these rows still
                have to be moved by. A block's parts come in order, the last one last.
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
            landing = block.landing
            assert landing is not None
            landing.uploaded = uploaded
            computed.append(landing.computed)
            if landing.buffer is not None:
                landing.buffer.uploads.append(uploaded)
            values, columns = landing.values, block.deferred_columns
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

    def take_landings(self, blocks: Iterable[Block], step: int) -> list[Landing]:
        """Take what lands in this step off its blocks; all its uploads have been started."""
        landings = []
        for block in blocks:
            landing = block.landing
            if landing is not None and self.lands(block, step):
                assert landing.uploaded is not None, "an update that lands was never let up"
                landings.append(landing)
                landing.end()
        return landings

    def wait(self, landings: Sequence[Landing]) -> None:
        """Let the next forward see these updates; what is not there yet is stall."""
        if not landings:
            return
        with self.stalls.waiting("d2h"):
            wait_all(unique(c for x in landings for c in x.copied), self.wait_timeout)
        with self.stalls.waiting("host"):
            wait_all(unique(x.computed for x in landings), self.wait_timeout)
        with self.stalls.waiting("h2d"):
            self.order_after_uploads(landings)

    def order_after_uploads(self, landings: Iterable[Landing]) -> None:
        """Let compute launched from now on come after the uploads that have been started."""
        for uploaded in unique(landing.uploaded for landing in landings):
            uploaded.wait_launched(self.wait_timeout)
            self.device.order_after(uploaded)
