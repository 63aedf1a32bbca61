"""The host's tasks of one step: what they do to which rows, and what they wait for."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from zenflow.columns.host_update import Accumulation, Job, Moments, Update, WindowUpdate, parts_of
from zenflow.columns.layout import Block, Bucket, Landing
from zenflow.columns.upload_buffers import UploadBuffer, UploadPool
from zenflow.config import ZenFlowConfig
from zenflow.device.base import HostValues
from zenflow.host.pool import HostPool
from zenflow.lanes.completion import Completion, unique
from zenflow.lanes.host_worker import HostWorker
from zenflow.rule.adamw import Hyper
from zenflow.rule.calendar import WindowCalendar
from zenflow.step.gradients import StepGradients


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step under way, as the host's work sees it."""

    number: int
    """Number of the step, from 1."""
    lag: int
    """Number of steps from the start of this step's updates to their landing."""
    gradients: StepGradients
    """Gradients of the step: the last ones of all windows that end with it."""
    hypers: Sequence[Hyper]
    """AdamW's settings of each parameter group."""
    values: HostValues
    """Measured values on their way to the host. The first is the factor on the gradients: the
    clip factor times the inverse loss scale."""

    @property
    def factor(self) -> float:
        """Factor on the gradients; blocks until it is on the host."""
        return self.values.get()[0]

    def has_gradient(self, block: Block) -> bool:
        """Whether the block's parameter has a gradient in this step."""
        return block.split in self.gradients.important

    def copies_of(self, bucket: int) -> list[Completion]:
        """Return the copies of a bucket's gradients to the host."""
        return self.gradients.copied.get(bucket, [])


@dataclass(eq=False, repr=False)
class HostTasks:
    """Queues what the host does to a step's gradients, and puts updates in flight."""

    config: ZenFlowConfig
    calendar: WindowCalendar
    worker: HostWorker
    pool: HostPool | None
    uploads: UploadPool
    _buffer: UploadBuffer | None = field(default=None, init=False)
    _former_uploads: list[Completion] = field(default_factory=list, init=False)

    @property
    def moves_moments_each_step(self) -> bool:
        """Whether the moments see each gradient, not each window's mean."""
        return self.config.deferred_moments == "step"

    def is_fused(self, step: Step) -> bool:
        """Whether an update that starts at this step takes the window's last gradient itself.

        It saves a pass over memory. But the staging is then free only once the update is over:
        where a lag of 2 or more gives it longer than a step, the gradient joins the others' sum.
        Moments that see every gradient can't wait: the next one comes a step later.
        """
        return self.moves_moments_each_step or step.lag <= 1

    def take_buffer(self, step: Step, updating: Sequence[Block]) -> None:
        """Find memory for the uploads of all blocks whose updates start at this step.

        What lands inside its own step needs none: each weight may take the place of the staged
        gradient that it came from, and is uploaded before the next gradient is staged.
        """
        self._buffer, self._former_uploads = None, []
        if not updating or step.lag == 0:
            return
        self._buffer = self.uploads.take(updating)
        self._former_uploads = [copy for copy in self._buffer.uploads if not copy.is_done]
        self._buffer.uploads.clear()

    def accumulate(self, step: Step, bucket: Bucket, skipped: Collection[Block]) -> None:
        """Queue what takes a bucket's staged gradients in, but for blocks whose update does."""
        blocks = [
            block
            for block in bucket.blocks
            if step.has_gradient(block) and block.shape.num_deferred and block not in skipped
        ]
        if not blocks:
            return
        done = self.worker.submit(
            "accumulate",
            parts_of(
                [self._gradient_job(step, block) for block in blocks], step.values, self.pool
            ),
            deadline=step.number + 1,  # the next backward brings new gradients into the staging
            step=step.number,
            after=unique([*step.copies_of(bucket.index), *(b.staging_free for b in blocks)]),
        )
        for block in blocks:
            block.staging_free = done

    def _gradient_job(self, step: Step, block: Block) -> Job:
        """Return what takes the block's staged gradient in, in mid-window."""
        if self.moves_moments_each_step:
            return Moments(block.host, block.host_shape, step.hypers[block.split.group])
        return Accumulation(
            block.host, block.host_shape, block.accumulator, first=block.count == 1
        )

    def window_update(self, step: Step, block: Block) -> WindowUpdate:
        """Return the update that ends the block's window."""
        reads_staging = self.is_fused(step) and step.has_gradient(block)
        sees_each = self.moves_moments_each_step
        has_sum = not sees_each and block.count > reads_staging
        return WindowUpdate(
            hyper=step.hypers[block.split.group],
            lr_scale=self.config.lr_scale(block.count),
            count=1 if sees_each else block.count,
            accumulator=block.accumulator if has_sum else None,
            reads_staging=reads_staging,
            prediction=self.calendar.lead(step.number) / block.count,
        )

    def update(self, step: Step, blocks: Sequence[Block], active: Mapping[int, Tensor]) -> None:
        """Queue the updates of one bucket's windows that end, and put them in flight.

        Args:
            step: The step under way.
            blocks: Blocks of one bucket, with gradients in their windows.
            active: Flags of the host rows that take part, (D,), uint8, by the block's index.
        """
        if not blocks:
            return
        copied = step.copies_of(blocks[0].split.bucket)
        jobs = [
            Update(
                host=block.host,
                shape=block.host_shape,
                window=self.window_update(step, block),
                active=active[block.index],
                out=block.host.staging if self._buffer is None else self._buffer.view_of(block),
            )
            for block in blocks
        ]
        computed = self._submit_updates(step, blocks, jobs, copied)
        for block, job in zip(blocks, jobs, strict=True):
            Landing(
                block=block,
                values=job.out,
                buffer=self._buffer,
                land_step=step.number + step.lag,
                opened=self.calendar.opened[block.index],
                copied=copied if step.lag == 0 else (),
                computed=computed,
            ).begin()
            block.last_update = computed
            if self.is_fused(step):
                block.staging_free = computed  # the update itself reads the staging
            block.switch_accumulator()

    def _submit_updates(
        self,
        step: Step,
        blocks: Sequence[Block],
        jobs: Sequence[Update],
        copied: Sequence[Completion],
    ) -> Completion:
        """Queue one task for the updates of one bucket."""
        # A fused one must be over when the next gradient is staged.
        steps_left = min(step.lag, 1) if self.is_fused(step) else step.lag
        return self.worker.submit(
            "adam",
            parts_of(jobs, step.values, self.pool),
            deadline=step.number + steps_left,
            step=step.number,
            after=unique(
                [
                    *copied,
                    *(block.staging_free for block in blocks),
                    *(block.last_update for block in blocks),
                    *self._former_uploads,
                ]
            ),
        )
