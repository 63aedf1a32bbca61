"""The host's tasks of one step: the part that both update rules share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zenflow.columns.device_rows import Resident
from zenflow.columns.gradient_queue import StagedGradient
from zenflow.columns.host_rows import HostRows
from zenflow.columns.host_update import RowWork, parts_of
from zenflow.columns.layout import Block, Bucket, Layout, PendingUpload, SplitParam
from zenflow.columns.upload_buffer import UploadBuffer
from zenflow.columns.upload_pool import UploadPool
from zenflow.device.base import HostValues
from zenflow.host.pool import HostPool
from zenflow.lanes.completion import Completion, unique
from zenflow.lanes.host_worker import HostWorker
from zenflow.rule.adamw import Hyper
from zenflow.rule.calendar import WindowCalendar
from zenflow.step.gradients.collector import StepGradients


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Facts of a step under way that the host's work needs."""

    number: int
    """Number of the step, from 1."""
    lag: int
    """Number of steps from the start of this step's updates to their landing."""
    inverse_scale: float
    """Factor that undoes the loss scale."""
    gradients: StepGradients
    """Gradients of the step: the last ones of all windows that end with the step."""
    hypers: Sequence[Hyper]
    """AdamW's settings of each parameter group."""
    values: HostValues
    """Measured values on their way to the host. The first is the factor on gradients: clip factor
    times inverse loss scale."""

    def has_gradient(self, block: Block) -> bool:
        """Whether the block's parameter has a gradient in this step."""
        return block.split in self.gradients.important

    def hyper_of(self, block: Block) -> Hyper:
        """Return AdamW's settings of the block's parameter group."""
        return self.hypers[block.split.group]

    def copies_of(self, bucket: int) -> list[Completion]:
        """Return the copies of a bucket's gradients to the host."""
        return self.gradients.copied.get(bucket, [])


@dataclass(frozen=True, slots=True)
class WindowWork:
    """Work that ends a block's window on the host."""

    block: Block
    """Block whose window ends."""
    out: Tensor
    """Weights to upload, (D, O) in the parameter's dtype."""
    rows: RowWork
    """Job on the block's host rows."""
    after: Sequence[Completion]
    """Work that must end before: copies of the gradients that the job reads."""


@dataclass(eq=False, repr=False)
class AbstractHostTasks(ABC):
    """Queues the host's work on a step's gradients, and puts updates in flight."""

    layout: Layout
    calendar: WindowCalendar
    worker: HostWorker
    pool: HostPool | None
    uploads: UploadPool
    _buffer: UploadBuffer | None = field(default=None, init=False)
    _former_uploads: list[Completion] = field(default_factory=list, init=False)
    _flags: dict[int, Tensor] = field(default_factory=dict, init=False)

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
    def window_work(self, step: Step, block: Block, active: Tensor, out: Tensor) -> WindowWork:
        """Return the work that ends a block's window, which has been closed in the calendar.

        Args:
            step: The step under way.
            block: The block.
            active: Flags of the rows that take part, (D,), uint8; the others are uploaded only.
            out: Output for the weights to upload.
        """

    @abstractmethod
    def window_ended(self, step: Step, block: Block, done: Completion) -> None:
        """Note that the work of `window_work` is queued."""

    @abstractmethod
    def finish_rows(self, step: Step, block: Block, rows: Tensor) -> HostRows:
        """Return copies of some rows as the window's end leaves them; all gradients are there."""

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

    @abstractmethod
    def renew(self) -> None:
        """Follow a resizing of all blocks; no gradient waits."""

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
        self._buffer, self._former_uploads = None, []
        if not updating or step.lag == 0:
            return
        self._buffer = self.uploads.take(updating)
        self._former_uploads = [copy for copy in self._buffer.uploads if not copy.is_done]
        self._buffer.uploads.clear()

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
        copied = step.copies_of(blocks[0].split.bucket)
        works = [
            self.window_work(
                step,
                block,
                active[block.index],
                block.host.staging if self._buffer is None else block.next_view_of(self._buffer),
            )
            for block in blocks
        ]
        after = [completion for work in works for completion in work.after]
        computed = self.submit(
            "adam",
            [work.rows for work in works],
            step=step.number,
            deadline=step.number + step.lag,
            bucket=blocks[0].split.bucket,
            after=[*after, *self._former_uploads, *(block.last_update for block in blocks)],
        )
        for work in works:
            block = work.block
            PendingUpload(
                block=block,
                values=work.out,
                buffer=self._buffer,
                land_step=step.number + step.lag,
                opened=opened[block.index],
                copied=copied if step.lag == 0 else (),
                computed=computed,
            ).begin()
            block.last_update = computed
            self.window_ended(step, block, computed)

    def submit(
        self,
        name: str,
        works: Sequence[RowWork],
        *,
        step: int,
        deadline: int,
        bucket: int,
        after: Iterable[Completion],
    ) -> Completion:
        """Queue one task of the host on a bucket's blocks.

        Among equally urgent tasks the bucket decides. Backward brings the first bucket's gradients
        first, so its memory is needed first.
        """
        return self.worker.submit(
            name,
            parts_of(works, self.pool),
            deadline=deadline,
            step=step,
            after=unique(after),
            rank=bucket,
        )
