"""Upload gate: starts uploads when weights are free, and waits for those that must land."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zenflow.device.base import Arrival
from zenflow.lanes.completion import Completion, unique, wait_all
from zenflow.lanes.copies import Copy
from zenflow.lanes.lease import Lease, take
from zenflow.rule.sizes import PASSING_BYTES, pieces

if TYPE_CHECKING:
    from torch import Tensor

    from zenflow.columns.in_flight import PendingUpload, UpdatesInFlight
    from zenflow.columns.layout import Block, Bucket, SplitParam
    from zenflow.device.base import AbstractDevice, Gather
    from zenflow.device.kernels.base import LateGradient
    from zenflow.device.stalls import StallClock
    from zenflow.lanes.copies import CopyLane
    from zenflow.rule.calendar import WindowCalendar
    from zenflow.step.fresh.steps import FreshSteps
    from zenflow.step.gradients.ring import PackJob

SPREAD_COPIES = 8
"""Bytes on the device for each byte of columns that come as changed weights: the columns, and for
each weight a mark and its place among the changed ones."""


@dataclass(eq=False, repr=False)
class UploadGate:
    """Starts uploads when weights are free, and waits for those that must have landed."""

    device: AbstractDevice
    lane: CopyLane
    stalls: StallClock
    calendar: WindowCalendar
    wait_timeout: float
    gather: Gather | None
    in_flight: UpdatesInFlight
    fresh: FreshSteps | None
    """Fresh steps, which gradients newer than an upload still owe it; None for none."""

    def landing(self, step: int) -> set[Block]:
        """Return the blocks whose updates in flight land in this step.

        An update lands at its landing step, and at the latest when the block's next window ends.
        """
        return {update.block for update in self.in_flight if self._lands(update, step)}

    def _lands(self, update: PendingUpload, step: int) -> bool:
        return update.land_step == step or self.calendar.is_due(update.block.index, step)

    def awaited(self, blocks: Iterable[Block], step: int) -> list[Block]:
        """Return those of some blocks whose uploads are to begin in this step, and have not."""
        updates = filter(None, map(self.in_flight.of, blocks))
        return [u.block for u in updates if u.uploaded is None and self._lands(u, step)]

    def start_bucket(
        self, bucket: Bucket, mark: Any, step: int, grads: Mapping[SplitParam, Tensor]
    ) -> None:
        """Queue the uploads that land in a bucket's weights, which backward has passed.

        Args:
            bucket: The bucket.
            mark: The device's position after the last use of the weights.
            step: The step under way.
            grads: This host's rows of the bucket's gradients, (O, I). They are newer than the
                upload, so that the fresh step is applied on arrival.
        """

        def late(block: Block) -> LateGradient | None:
            grad_OI = grads.get(block.split)
            return None if grad_OI is None else self._late(block, grad_OI.t(), is_packed=False)

        self.start_uploads(bucket.blocks, mark, step, late)

    def start_piece(
        self, jobs: Sequence[PackJob], packed: Sequence[Tensor], slot: Lease, mark: Any, step: int
    ) -> None:
        """Queue the uploads that land on the columns of a piece of the ring.

        The piece's gradients are newer than the upload, so that the fresh step is applied on
        arrival.

        Args:
            jobs: The piece.
            packed: Its packed columns, (D, O) each.
            slot: Lease of their memory.
            mark: The device's position after the last use of the weights.
            step: The step under way.
        """
        parts = [
            (job.block, job.low, job.high, self._late(job.block, rows, is_packed=True))
            for job, rows in zip(jobs, packed, strict=True)
            if (update := self.in_flight.of(job.block)) and self._lands(update, step)
        ]
        self._start_parts(parts, mark, step, [slot])

    def _late(self, block: Block, rows: Tensor, *, is_packed: bool) -> LateGradient | None:
        if self.fresh is None:
            return None
        return self.fresh.late(block, rows, is_packed=is_packed)

    def start_uploads(
        self,
        blocks: Iterable[Block],
        mark: Any,
        step: int,
        late: Callable[[Block], LateGradient | None] = lambda _: None,
    ) -> None:
        """Queue the uploads that land in this step, for blocks whose weights are not in use.

        They arrive in pieces, so that few bytes of the device hold them on their way.

        Args:
            blocks: Any blocks; blocks without a landing update are skipped.
            mark: The device's position after the last use of the weights.
            step: The step under way.
            late: Function that returns the gradient whose fresh step a block's weights still need.
        """
        self._start_parts(
            [
                (block, part.start, part.stop, own)
                for block in self.awaited(blocks, step)
                for own in (late(block),)
                for part in pieces(block.shape.num_deferred, block.column_bytes)
            ],
            mark,
            step,
        )

    def _start_parts(
        self,
        parts: Sequence[tuple[Block, int, int, LateGradient | None]],
        mark: Any,
        step: int,
        late_memory: Sequence[Lease] = (),
    ) -> None:
        """Queue the upload of some rows of updates that land in this step.

        Of changed weights the device makes whole rows, in more memory than these have: they come
        in smaller pieces.

        Args:
            parts: Block, first row, row after the last, and the gradient whose fresh step these
                rows still need. A block's parts come in order, the last one last.
            mark: The device's position after the last use of the weights.
            step: The step under way.
            late_memory: Leases of these gradients, where others may overwrite them.
        """
        if not parts:
            return  # most buckets of most steps
        uploaded = Completion(f"the upload of step {step} (h2d)")
        updates, arrivals = [], []
        pages = {block.split.page: None for block, *_ in parts}
        for block, low, high, late in parts:
            update = self.in_flight.of(block)
            assert update is not None
            update.uploaded = uploaded
            most = high - low
            if update.marks is not None:
                most = max(1, PASSING_BYTES // (SPREAD_COPIES * block.column_bytes))
            for first in range(low, high, most):
                updates.append(update)
                arrivals.append(_arrival(update, first, min(first + most, high), late))

        def get_ready() -> int:
            for index, update in enumerate(updates):
                arrivals[index] = arrivals[index].ready()
                update.num_bytes += arrivals[index].num_bytes
            return sum(arrival.num_bytes for arrival in arrivals)

        self.lane.submit(
            Copy(
                run=lambda: self.device.unpack(arrivals, mark, self.gather),
                after=take(
                    uploaded,
                    reads=[*dict.fromkeys(update.lease for update in updates), *late_memory],
                    fills=[page.lease for page in pages if page is not None],
                ),
                completion=uploaded,
                num_bytes=get_ready,
                step=step,
            )
        )

    def take_landings(self, step: int) -> list[PendingUpload]:
        """Take the updates that land in this step out of flight; their uploads have started."""
        landed = [update for update in self.in_flight if self._lands(update, step)]
        for update in landed:
            assert update.uploaded is not None, "an update that lands was never let up"
            self.in_flight.end(update)
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


def _arrival(update: PendingUpload, first: int, last: int, late: LateGradient | None) -> Arrival:
    """Return rows first..last-1 of an update on their way."""
    block = update.block
    values, marks, columns = update.values, update.marks, block.deferred
    if last - first < block.shape.num_deferred:  # a view costs as much as an operation
        values = values[first:last]
        marks = None if marks is None else marks[first:last]
        row = columns.first_row
        columns = block.split.host_columns(row + first, row + last)
    return Arrival(values, columns, block.split.weight(), late, marks)
