"""The host's tasks of the exact rule: an AdamW step per gradient, several in a catch-up pass."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from zenflow.columns.byte_memory import ByteMemory
from zenflow.columns.gradient_queue import RoomPool, StagedGradient, adam_step
from zenflow.columns.host_rows import HostRows
from zenflow.columns.host_update import RowWork, catch_up, stepped
from zenflow.columns.layout import Block, Bucket
from zenflow.host.jobs import HostJob, Upload
from zenflow.lanes.lease import Lease
from zenflow.rule.momentum import upload_lead
from zenflow.step.host.changed import ChangedUploads
from zenflow.step.host.tasks import AbstractHostTasks, WindowWork
from zenflow.step.step import Step


@dataclass(eq=False, repr=False)
class ExactTasks(AbstractHostTasks):
    """AdamW on every gradient, applied when the queue is full or the window ends.

    The wait of a gradient changes no bit of float32 state: each is a step of its own, in order,
    with the settings and the clip factor of its own step. Compact state is rounded once a pass. So
    there the passes must not depend on the order in which gradients come: the first one of a step
    takes rooms for all blocks, in their order.
    """

    rooms: RoomPool
    """Pool for a block's second and further gradients; the first waits in the staging buffer."""
    depth: int
    """Largest number of a block's gradients that wait, q."""
    is_compact: bool
    """Whether the state is rounded once a pass."""
    is_factored: bool
    """Whether gradients come divided by the roots of their second moments, without loss scale."""
    changed: ChangedUploads | None
    """Memory of the last uploads, for those of changed weights alone; None where all are sent."""
    queues: list[list[StagedGradient]] = field(init=False)
    """Gradients of each block that wait, the oldest first, by the block's index."""

    def __post_init__(self) -> None:
        """Start with no gradient."""
        self._arriving: dict[Block, StagedGradient] = {}
        self._reserved: dict[Block, StagedGradient] = {}
        self.queues = [[] for _ in self.layout.blocks]
        super().__post_init__()

    @property
    def host_bytes(self) -> int:
        """Bytes of the tasks' host memory, without the rows."""
        return self.rooms.num_bytes

    @property
    def pinned_bytes(self) -> int:
        """Bytes of `host_bytes` that are pinned where the device is a GPU."""
        return self.rooms.num_bytes

    @property
    def pools(self) -> Sequence[ByteMemory]:
        """Memory of gradients that wait, beside staging; free when nothing waits."""
        return (self.rooms.memory,)

    def renew(self) -> None:
        """Follow a resizing of all blocks; no gradient waits."""
        self.rooms.clear()
        self._forget(self.layout.blocks)

    def _forget(self, blocks: Iterable[Block]) -> None:
        """Let the next uploads of some blocks, whose rows change now, have all weights."""
        if self.changed is not None:
            self.changed.forget(blocks)

    def leases_of(self, block: Block) -> list[Lease]:
        """Return the leases of the block's rows and staging, and of all gradients that wait."""
        waiting = [staged.lease for staged in self.queues[block.index]]
        return [*super().leases_of(block), *waiting]

    def begin_anew(self) -> None:
        """Forget the users of all memory, and windows' sums; no gradient waits, no task runs."""
        super().begin_anew()
        self._arriving.clear()
        self._reserved.clear()
        self.rooms.clear()
        self._forget(self.layout.blocks)

    def stage(self, block: Block) -> StagedGradient:
        """Return where a block's gradient of the step under way is to be copied."""
        if self.is_compact and not self._arriving and not self._reserved:
            for other in self.layout.blocks:
                if other.shape.num_deferred:
                    self._reserved[other] = self._find_memory(other)
        staged = self._reserved.pop(block, None) or self._find_memory(block)
        self._arriving[block] = staged
        return staged

    def _find_memory(self, block: Block) -> StagedGradient:
        """Return memory for a block's gradient; without any, what waits is applied first."""
        staging = block.host.staging
        taken = None
        if self.queues[block.index]:
            taken = self.rooms.take(block.gradient_shape, staging)
        if taken is not None:
            values, room = taken
            return StagedGradient(values, room.lease, room)
        self.flush([block])  # no room: what waits is applied now, which frees the own buffer
        lease = self.staging[block.index]
        lease.renew()
        return StagedGradient(staging, lease, None)

    def drop(self, blocks: Iterable[Block]) -> None:
        """Forget these blocks' gradients of the step under way."""
        for block in blocks:
            for memory in (self._arriving, self._reserved):
                staged = memory.pop(block, None)
                if staged is not None:
                    self._free([staged])

    def take_in(self, step: Step, bucket: Bucket, due: Collection[Block]) -> None:
        """Put a bucket's gradients into their queues, and apply queues that are full."""
        full = []
        for block in bucket.blocks:
            if unused := self._reserved.pop(block, None):
                self._free([unused])
            staged = self._arriving.pop(block, None)
            if staged is None:
                continue
            staged.step, staged.hyper, staged.factor = (
                step.number,
                step.hyper_of(block),
                step.values,
            )
            if self.is_factored:
                staged.applied = step.inverse_scale
            queue = self.queues[block.index]
            queue.append(staged)
            if len(queue) >= self.depth and block not in due:
                full.append(block)
        self._apply(full, step.number)

    def flush(self, blocks: Iterable[Block], *, step: Step | None = None) -> None:
        """Apply all gradients that wait for these blocks."""
        waiting = [block for block in blocks if self.queues[block.index]]
        if waiting:
            self._apply(waiting, max(self.queues[block.index][-1].step for block in waiting))

    def _apply(self, blocks: Sequence[Block], step: int) -> None:
        """Submit one catch-up pass over these blocks, without an upload."""
        if not blocks:
            return
        self._forget(blocks)
        queues = [self.queues[block.index] for block in blocks]
        works = [
            _work(block, partial(_catch_up, block.host, self.all_active(block), list(queue), None))
            for block, queue in zip(blocks, queues, strict=True)
        ]
        self.submit(
            "adam",
            works,
            step=step,
            deadline=step + 1,  # the next backward brings new gradients
            bucket=min(block.split.bucket for block in blocks),
            reads=[staged.lease for queue in queues for staged in queue],
            changes=[self.rows[block.index] for block in blocks],
        )
        for queue in queues:
            self._free(queue)
            queue.clear()

    def _free(self, queue: Sequence[StagedGradient]) -> None:
        """Give the gradients' rooms back, whose last readers are queued."""
        for staged in queue:
            if staged.room is not None:
                self.rooms.give(staged.room)

    def window_work(
        self, step: Step, block: Block, active: Tensor, out: Tensor, lease: Lease
    ) -> WindowWork:
        """Return the catch-up pass that ends the window and writes the upload."""
        hyper = step.hyper_of(block)
        landing = step.number + step.lag
        num_forwards = self.calendar.next_landing(block.index) - landing
        late = self.calendar.delay(hyper.beta1, num_forwards)
        count = block.split.num_steps
        queue = list(self.queues[block.index])
        upload = Upload(
            out=out,
            lead=upload_lead(hyper.beta1, step.lag, num_forwards, late, count),
            step=adam_step(hyper),
            repeats_last=bool(queue) and queue[-1].step == step.number,
        )
        marks = None
        if self.changed is not None:
            upload = self.changed.noted(step, block, upload)
            marks = None if upload.changes is None else upload.changes.marks
        make = partial(_catch_up, block.host, active, queue, upload)
        reads = [staged.lease for staged in queue]
        return WindowWork(block, out, lease, _work(block, make), reads, marks)

    def window_ended(self, step: Step, block: Block) -> None:
        """Free the memory of the window's gradients after the pass."""
        queue = self.queues[block.index]
        self._free(queue)
        queue.clear()

    def finish_rows(
        self, step: Step, block: Block, rows: Tensor, numbers: Sequence[Tensor]
    ) -> Tensor:
        """Copy some rows, all waiting gradients applied."""
        steps = [staged.adam_step(rows) for staged in self.queues[block.index]]
        return stepped(block.host.copied(rows, numbers), steps, self.pool)


def _work(block: Block, make: Callable[[], HostJob]) -> RowWork:
    on_drive = None if block.host.drive is None else block.host
    return RowWork(block.host_shape, make, on_drive)


def _catch_up(
    host: HostRows, active: Tensor, queue: Sequence[StagedGradient], upload: Upload | None
) -> HostJob:
    return catch_up(host, active, [staged.adam_step() for staged in queue], upload)
