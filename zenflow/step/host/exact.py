"""The host's tasks of the exact rule: an AdamW step per gradient, several in a catch-up pass."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from zenflow.columns.gradient_queue import RoomPool, StagedGradient, adam_step
from zenflow.columns.host_rows import HostRows
from zenflow.columns.host_update import RowWork, catch_up
from zenflow.columns.layout import Block, Bucket
from zenflow.host import kernel
from zenflow.host.jobs import HostJob, Upload
from zenflow.lanes.completion import Completion
from zenflow.rule.momentum import upload_lead
from zenflow.step.host.tasks import AbstractHostTasks, Step, WindowWork


@dataclass(eq=False, repr=False)
class ExactTasks(AbstractHostTasks):
    """AdamW on every gradient, applied when the queue is full or the window ends.

    The wait of a gradient changes no bit: each is a step of its own, in order, with the settings
    and the clip factor of its own step.
    """

    rooms: RoomPool
    """Pool for a block's second and further gradients; the first waits in the staging buffer."""
    depth: int
    """Largest number of a block's gradients that wait, q."""

    def __post_init__(self) -> None:
        """Start with no gradient."""
        self._arriving: dict[Block, StagedGradient] = {}

    @property
    def host_bytes(self) -> int:
        """Bytes of the tasks' host memory, without the rows."""
        return self.rooms.memory.num_bytes

    @property
    def pinned_bytes(self) -> int:
        """Bytes of `host_bytes` that are pinned where the device is a GPU."""
        return self.rooms.memory.num_bytes

    def renew(self) -> None:
        """Follow a resizing of all blocks; no gradient waits."""
        self.rooms.clear()

    def stage(self, block: Block) -> StagedGradient:
        """Return where a block's gradient of the step under way is to be copied."""
        taken = self.rooms.take(block.host_shape, block.host.staging) if block.queue else None
        if taken is not None:
            values, room = taken
            staged = StagedGradient(values, room, after=room.busy)
        else:
            self.flush([block])  # no room: what waits is applied now, which frees the own buffer
            staged = StagedGradient(block.host.staging, None, after=[block.staging_free])
        self._arriving[block] = staged
        return staged

    def drop(self, blocks: Iterable[Block]) -> None:
        """Forget these blocks' gradients of the step under way."""
        for block in blocks:
            staged = self._arriving.pop(block, None)
            if staged is not None:
                self._free(block, [staged], None)

    def take_in(self, step: Step, bucket: Bucket, due: Collection[Block]) -> None:
        """Put a bucket's gradients into their queues, and apply queues that are full."""
        full = []
        for block in bucket.blocks:
            staged = self._arriving.pop(block, None)
            if staged is None:
                continue
            staged.step, staged.hyper, staged.factor = (
                step.number,
                step.hyper_of(block),
                step.values,
            )
            block.queue.append(staged)
            if len(block.queue) >= self.depth and block not in due:
                full.append(block)
        self._apply(full, step.number)

    def flush(self, blocks: Iterable[Block], *, step: Step | None = None) -> None:
        """Apply all gradients that wait for these blocks."""
        waiting = [block for block in blocks if block.queue]
        if waiting:
            self._apply(waiting, max(block.queue[-1].step for block in waiting))

    def _apply(self, blocks: Sequence[Block], step: int) -> None:
        """Submit one catch-up pass over these blocks, without an upload."""
        if not blocks:
            return
        done = self.submit(
            "adam",
            [
                RowWork(
                    block.host_shape,
                    partial(
                        _catch_up, block.host, self.all_active(block), list(block.queue), None
                    ),
                )
                for block in blocks
            ],
            step=step,
            deadline=step + 1,  # the next backward brings new gradients
            bucket=min(block.split.bucket for block in blocks),
            after=[c for block in blocks for c in (*_copies(block.queue), block.last_update)],
        )
        for block in blocks:
            block.last_update = done
            self._free(block, block.queue, done)
            block.queue.clear()

    def _free(
        self, block: Block, queue: Sequence[StagedGradient], done: Completion | None
    ) -> None:
        """Free the gradients' memory after `done`, its last reader; None if nothing reads it."""
        for staged in queue:
            busy = list(staged.copied) if done is None else [done]
            if staged.room is not None:
                self.rooms.give(staged.room, busy)
            elif busy:
                block.staging_free = busy[-1]

    def window_work(self, step: Step, block: Block, active: Tensor, out: Tensor) -> WindowWork:
        """Return the catch-up pass that ends the window and writes the upload."""
        hyper = step.hyper_of(block)
        landing = step.number + step.lag
        num_forwards = self.calendar.next_landing(block.index) - landing
        queue = list(block.queue)
        upload = Upload(
            out=out,
            lead=upload_lead(hyper.beta1, step.lag, num_forwards),
            step=adam_step(hyper),
            repeats_last=bool(queue) and queue[-1].step == step.number,
        )
        make = partial(_catch_up, block.host, active, queue, upload)
        after = [*_copies(queue), block.staging_free]
        return WindowWork(block, out, RowWork(block.host_shape, make), after)

    def window_ended(self, step: Step, block: Block, done: Completion) -> None:
        """Free the memory of the window's gradients after the pass."""
        self._free(block, block.queue, done)
        block.queue.clear()
        if step.lag == 0:
            block.staging_free = done  # the upload takes the place of the staged gradient

    def finish_rows(self, step: Step, block: Block, rows: Tensor) -> HostRows:
        """Return copies of some rows, all waiting gradients applied."""
        leaving = block.host.rows(rows)
        steps = [
            adam_step(staged.hyper, staged.factor.get()[0], staged.values[rows])
            for staged in block.queue
            if staged.hyper is not None and staged.factor is not None
        ]
        active = torch.ones(len(rows), dtype=torch.uint8, device="cpu")
        kernel.run(catch_up(leaving, active, steps, None))
        return leaving


def _copies(queue: Sequence[StagedGradient]) -> list[Completion]:
    return [copy for staged in queue for copy in staged.copied]


def _catch_up(
    host: HostRows, active: Tensor, queue: Sequence[StagedGradient], upload: Upload | None
) -> HostJob:
    return catch_up(host, active, [staged.adam_step() for staged in queue], upload)
