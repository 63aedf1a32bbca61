"""The host's tasks of one step: the part that both update rules share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zenflow.columns.byte_memory import ByteMemory
from zenflow.columns.device_rows import Resident
from zenflow.columns.gradient_queue import StagedGradient
from zenflow.columns.host_update import Part, RowWork, extent_parts, parts_of
from zenflow.columns.in_flight import PendingUpload, UpdatesInFlight
from zenflow.columns.layout import Block, Bucket, Layout, SplitParam
from zenflow.columns.upload_pool import UploadPool
from zenflow.drive.loan import Loan, Urgency
from zenflow.host.pool import HostPool
from zenflow.lanes.completion import Completion
from zenflow.lanes.host_worker import HostWorker
from zenflow.lanes.lease import Lease, take
from zenflow.rule.calendar import WindowCalendar
from zenflow.step.step import Step


@dataclass(slots=True, eq=False)
class Window:
    """A block's open window."""

    count: int = 0
    """Number of gradients in it, n."""
    wants_selection: bool = False
    """Whether a selection follows when it ends."""


@dataclass(frozen=True, slots=True)
class WindowWork:
    """Work that ends a block's window on the host."""

    block: Block
    """Block whose window ends."""
    out: Tensor
    """Weights to upload, (D, O) in the parameter's dtype."""
    lease: Lease
    """Lease of the memory of `out`."""
    rows: RowWork
    """Job on the block's host rows."""
    reads: Sequence[Lease]
    """Leases of the gradients that the job reads."""
    marks: Tensor | None = None
    """Marks of changed weights that the job writes, under the lease of `out`; None for none."""


@dataclass(eq=False, repr=False)
class AbstractHostTasks(ABC):
    """Queues the host's work on a step's gradients, and puts updates in flight."""

    layout: Layout
    calendar: WindowCalendar
    worker: HostWorker
    pool: HostPool | None
    uploads: UploadPool
    in_flight: UpdatesInFlight
    windows: list[Window]
    """Open window of each block, by the block's index."""
    staging: list[Lease] = field(init=False)
    """Lease of each block's staging buffer, by the block's index."""
    rows: list[Lease] = field(init=False)
    """Lease of each block's host rows, by the block's index."""
    accumulators: list[int] = field(init=False)
    """Index of the sum that each block's open window uses, by the block's index; of use to the
    published rule only."""
    _flags: dict[int, Tensor] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        """Start with nothing under way."""
        self.begin_anew()

    # ---- what a rule does with gradients ----------------------------------------------------

    @abstractmethod
    def stage(self, block: Block) -> StagedGradient:
        """Return where a block's gradient of the step under way is to be copied."""

    @abstractmethod
    def take_in(self, step: Step, bucket: Bucket, due: Collection[Block]) -> None:
        """Take in a bucket's gradients, whose step is taken: no drop can follow.

        Args:
            step: The step under way.
            bucket: The bucket.
            due: Blocks whose windows end with this step: `window_work` follows.
        """

    @abstractmethod
    def drop(self, blocks: Iterable[Block]) -> None:
        """Forget these blocks' gradients of the step under way."""

    @abstractmethod
    def window_work(
        self, step: Step, block: Block, active: Tensor, out: Tensor, lease: Lease
    ) -> WindowWork:
        """Return the work that ends a block's window, which has been closed in the calendar.

        Args:
            step: The step under way.
            block: The block.
            active: Flags of the rows that take part, (D,), uint8; the others are uploaded only.
            out: Output for the weights to upload.
            lease: Lease of the memory of `out`.
        """

    @abstractmethod
    def window_ended(self, step: Step, block: Block) -> None:
        """Note that the work of `window_work` is queued."""

    @abstractmethod
    def finish_rows(
        self, step: Step, block: Block, rows: Tensor, numbers: Sequence[Tensor]
    ) -> Tensor:
        """Copy some rows as the window's end leaves them; all gradients are there.

        Args:
            step: The step under way.
            block: The block.
            rows: Indices of the rows, (n,), int64.
            numbers: Outputs for weights and moments, (n, O), float32.

        Returns:
            The number of Adam steps that each of these rows has taken then, (n,), int64.
        """

    @abstractmethod
    def flush(self, blocks: Iterable[Block], *, step: Step | None = None) -> None:
        """Queue the work that brings the host's rows to the last step, or to a window's end.

        Args:
            blocks: The blocks.
            step: Step with which all their windows end; None between two steps.
        """

    # ---- state ------------------------------------------------------------------------------

    @property
    @abstractmethod
    def host_bytes(self) -> int:
        """Bytes of the tasks' host memory, without the rows."""

    @property
    @abstractmethod
    def pinned_bytes(self) -> int:
        """Bytes of `host_bytes` that are pinned where the device is a GPU."""

    @property
    def pools(self) -> Sequence[ByteMemory]:
        """Memory of gradients that wait, beside staging; free when nothing waits."""
        return ()

    @abstractmethod
    def renew(self) -> None:
        """Follow a resizing of all blocks; no gradient waits."""

    def begin_anew(self) -> None:
        """Forget the users of all memory, and windows' sums; no gradient waits, no task runs."""
        blocks = self.layout.blocks
        self.staging, self.rows = ([Lease() for _ in blocks] for _ in range(2))
        self.accumulators = [0] * len(blocks)

    def leases_of(self, block: Block) -> list[Lease]:
        """Return the leases of all memory in which the block's gradients and state are."""
        return [self.staging[block.index], self.rows[block.index]]

    def users_of(self, blocks: Iterable[Block]) -> list[Completion]:
        """Return all work on these blocks' gradients and state that may not have ended."""
        return [w for block in blocks for lease in self.leases_of(block) for w in lease.users]

    def param_state(self, place: SplitParam | Resident) -> dict[str, Tensor]:
        """Return the live tensors, other than rows, that a parameter's checkpoint needs."""
        del place
        return {}

    # ---- updates ----------------------------------------------------------------------------

    def all_active(self, block: Block) -> Tensor:
        """Return read-only flags by which all rows take part: (D,), uint8."""
        count = block.shape.num_deferred
        if count not in self._flags:
            self._flags[count] = torch.ones(count, dtype=torch.uint8, device="cpu")
        return self._flags[count]

    def take_buffer(self, step: Step, updating: Sequence[Block]) -> None:
        """Find memory for the uploads of all blocks whose updates start at this step.

        Updates that land inside their own step need none: each weight may overwrite the staged
        gradient that it came from, and is uploaded before the next gradient is staged.
        """
        if updating and step.lag:
            step.buffer = self.uploads.take(updating)

    def update(
        self,
        step: Step,
        blocks: Sequence[Block],
        active: Mapping[int, Tensor],
        opened: Mapping[int, int],
    ) -> None:
        """Queue the updates of one bucket's windows that end, and put them in flight.

        Args:
            step: The step under way.
            blocks: Blocks of one bucket, with gradients in their windows.
            active: Flags of the host rows that take part, (D,), uint8, by the block's index.
            opened: Step after which each window began, by the block's index.
        """
        if not blocks:
            return
        bucket = blocks[0].split.bucket
        works = [
            self.window_work(step, block, active[block.index], *self._output(step, block))
            for block in blocks
        ]
        outs, rows = [work.lease for work in works], [self.rows[block.index] for block in blocks]
        is_in_place = step.buffer is None
        computed = self.submit(
            "adam",
            [work.rows for work in works],
            step=step.number,
            deadline=step.number + step.lag,
            bucket=bucket,
            reads=[lease for work in works for lease in work.reads if lease is not work.lease],
            fills=() if is_in_place else outs,
            changes=[*rows, *outs] if is_in_place else rows,
        )
        for work in works:
            block = work.block
            self.in_flight.begin(
                PendingUpload(
                    block=block,
                    values=work.out,
                    lease=work.lease,
                    buffer=step.buffer,
                    land_step=step.number + step.lag,
                    opened=opened[block.index],
                    copied=step.gradients.copied.get(bucket, ()) if is_in_place else (),
                    computed=computed,
                    marks=work.marks,
                )
            )
            self.window_ended(step, block)

    def _output(self, step: Step, block: Block) -> tuple[Tensor, Lease]:
        """Return the memory of a block's weights to upload, (D, O), and its lease."""
        if step.buffer is None:
            return block.host.staging, self.staging[block.index]
        return step.buffer.next_piece(block.host_shape, block.split.param.dtype)

    def submit(
        self,
        name: str,
        works: Sequence[RowWork],
        *,
        step: int,
        deadline: int,
        bucket: int,
        reads: Sequence[Lease] = (),
        fills: Sequence[Lease] = (),
        changes: Sequence[Lease] = (),
    ) -> Completion:
        """Queue one task of the host on a bucket's blocks.

        Among equally urgent tasks the bucket decides. Backward brings the first bucket's gradients
        first, so its memory is needed first. The last arguments are those of
        `zenflow.lanes.lease.take`.
        """
        done = Completion(f"the host's {name} of step {step}")
        parts, loans = self._parts_of(works, (deadline, step, bucket), step)
        self.worker.submit(
            name,
            parts,
            loans=loans,
            completion=done,
            deadline=deadline,
            step=step,
            after=take(done, reads=reads, fills=fills, changes=changes),
            rank=bucket,
        )
        return done

    def _parts_of(
        self, works: Sequence[RowWork], urgency: Urgency, step: int
    ) -> tuple[list[Part], Sequence[Loan]]:
        """Return the parts of a task, and the extents of a drive that they need."""
        if works and works[0].on_drive is not None:
            return extent_parts(works, self.pool, urgency, step)
        return parts_of(works, self.pool), ()
