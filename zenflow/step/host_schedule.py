"""What the host does with a step's gradients: which blocks accumulate, update, select."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from zenflow.columns.host_rows import UploadBuffer, UploadPool, carve
from zenflow.columns.host_update import Accumulation, Job, Moments, Update, WindowUpdate, parts_of
from zenflow.columns.layout import Block, Bucket, Landing, Layout
from zenflow.columns.reselect import hand_over
from zenflow.columns.resize import resize
from zenflow.config import ZenFlowConfig
from zenflow.device.base import AbstractDevice, HostValues
from zenflow.host.pool import HostPool
from zenflow.lanes.completion import Completion
from zenflow.lanes.host_worker import HostWorker
from zenflow.rule.adamw import Hyper
from zenflow.rule.calendar import WindowCalendar
from zenflow.step.gradients import StepGradients
from zenflow.step.uploads import unique


class HostSchedule:
    """Turns windows that end into host tasks and landings."""

    def __init__(
        self,
        layout: Layout,
        config: ZenFlowConfig,
        calendar: WindowCalendar,
        worker: HostWorker,
        pool: HostPool | None,
        uploads: UploadPool,
        device: AbstractDevice,
        wait_timeout: float,
    ) -> None:
        """Wire up; the engine owns all of these."""
        self._device = device
        self._layout = layout
        self._config = config
        self._calendar = calendar
        self._worker = worker
        self._pool = pool
        self._uploads = uploads
        self._wait_timeout = wait_timeout
        self._sees_each = config.deferred_moments == "step"
        self._buffer: UploadBuffer | None = None
        self._former_uploads: list[Completion] = []
        self.renew()

    def renew(self) -> None:
        """Take note that blocks have got other numbers of rows."""
        self._all_active = {
            block.index: torch.ones(block.shape.num_deferred, dtype=torch.uint8)
            for block in self._layout.blocks
        }

    @property
    def _resizes(self) -> bool:
        """Whether every block gets another number of important columns in this step."""
        return self._layout.topk_ratio != self._calendar.knobs.topk_ratio

    def begin(
        self, gradients: StepGradients, hypers: Sequence[Hyper], factor: HostValues, step: int
    ) -> list[Block]:
        """Queue the host's work for a step, but for the blocks that select at its end.

        Every landing of this step has been collected.

        Returns:
            The blocks whose selection is due now; `select` finishes them.
        """
        if self._calendar.selects(step):
            for block in self._layout.blocks:
                block.wants_selection = True
        next_due = self._calendar.next_due
        due = [block for block in self._layout.blocks if next_due[block.index] == step]
        for block in self._layout.blocks:
            block.count += block.split in gradients.important
        skipped = set(due) if self._is_fused(step) else set()
        if self._resizes:
            for bucket in self._layout.buckets:
                self._accumulate(bucket, gradients, hypers, factor, step, skipped)
            return due
        updating = [block for block in due if block.count and block.shape.num_deferred]
        self._take_buffer(updating, step)
        selecting = [b for b in due if b.wants_selection and self._can_select(b)]
        chosen = set(selecting)
        rest = _by_bucket(block for block in updating if block not in chosen)
        for bucket in self._layout.buckets:
            # Both kinds of work in one pass: a bucket's staging is free for the next gradients in
            # the order in which backward brings them.
            self._accumulate(bucket, gradients, hypers, factor, step, skipped)
            blocks = rest.get(bucket.index, [])
            self._update(blocks, gradients, hypers, factor, step, self._all_active)
        for block in due:
            if block not in chosen:
                self._close(block, step)
        return selecting

    def _is_fused(self, step: int) -> bool:
        """Whether an update that starts at this step takes the window's last gradient itself.

        It saves a pass over memory. But the staging is then free only once the update is over:
        where a lag of 2 or more gives it longer than a step, the gradient joins the others' sum.
        Moments that see every gradient can't wait: the next one comes a step later.
        """
        return self._sees_each or self._calendar.lag(step) <= 1

    def _take_buffer(self, updating: Sequence[Block], step: int) -> None:
        """Find memory for this step's uploads.

        What lands inside its own step needs none: each weight may take the place of the staged
        gradient that it came from, and is uploaded before the next gradient is staged.
        """
        self._buffer, self._former_uploads = None, []
        if not updating or self._calendar.lag(step) == 0:
            return
        sizes = [(b.shape.deferred_elements, b.split.param.dtype) for b in updating]
        self._buffer = self._uploads.take(sizes)
        self._former_uploads = [c for c in self._buffer.uploads if not c.is_finished()]
        self._buffer.uploads.clear()

    @staticmethod
    def _can_select(block: Block) -> bool:
        return block.shape.num_important > 0 and block.shape.num_deferred > 0

    def select(
        self,
        blocks: Sequence[Block],
        gradients: StepGradients,
        hypers: Sequence[Hyper],
        factor: HostValues,
        step: int,
    ) -> None:
        """Hand columns over in these blocks and start their updates; the last landing is over."""
        for block in blocks:
            for copy in gradients.copied.get(block.split.bucket, ()):
                copy.wait(self._wait_timeout)
            block.staging_free.wait(self._wait_timeout)
            block.last_update.wait(self._wait_timeout)
        updates = {
            block.index: self._window_update(block, gradients, hypers, step)
            for block in blocks
            if block.count
        }
        if self._resizes:
            self._resize(updates, gradients, hypers, factor, step)
            return
        active = {
            block.index: hand_over(
                block, updates.get(block.index), factor.get()[0], self._config.hysteresis
            )
            for block in blocks
        }
        for members in _by_bucket(block for block in blocks if block.count).values():
            self._update(members, gradients, hypers, factor, step, active)
        for block in blocks:
            self._close(block, step)

    def _resize(
        self,
        updates: Mapping[int, WindowUpdate],
        gradients: StepGradients,
        hypers: Sequence[Hyper],
        factor: HostValues,
        step: int,
    ) -> None:
        """Go over to the ratio in force, start all windows' updates and open new windows."""
        blocks = self._layout.blocks
        self._device.synchronize()  # copies have been waited for, but kernels read tensors too
        ratio = self._calendar.knobs.topk_ratio
        active = resize(self._layout, ratio, self._config.hysteresis, updates, factor.get()[0])
        self.renew()
        updating = [block for block in blocks if block.count and block.shape.num_deferred]
        self._take_buffer(updating, step)
        for members in _by_bucket(updating).values():
            self._update(members, gradients, hypers, factor, step, active)
        self._calendar.open_all([block.shape for block in blocks], step)
        for block in blocks:
            block.count = 0
            block.wants_selection = False

    def _close(self, block: Block, step: int) -> None:
        block.count = 0
        block.wants_selection = False
        self._calendar.close(block.index, step)

    def _accumulate(
        self,
        bucket: Bucket,
        gradients: StepGradients,
        hypers: Sequence[Hyper],
        factor: HostValues,
        step: int,
        skipped: set[Block],
    ) -> None:
        """Queue what takes a bucket's staged gradients in, but for blocks whose update does."""
        blocks = [
            block
            for block in bucket.blocks
            if block.split in gradients.important
            and block.shape.num_deferred
            and block not in skipped
        ]
        if not blocks:
            return
        jobs = [self._intake_job(block, hypers) for block in blocks]
        done = self._worker.submit(
            "accumulate",
            parts_of(jobs, factor, self._pool),
            deadline=step + 1,  # the next backward brings new gradients into the staging
            step=step,
            after=unique([*gradients.copied[bucket.index], *(b.staging_free for b in blocks)]),
        )
        for block in blocks:
            block.staging_free = done

    def _intake_job(self, block: Block, hypers: Sequence[Hyper]) -> Job:
        """Return what takes the block's staged gradient in, in mid-window."""
        if self._sees_each:
            return Moments(block.host, block.host_shape, hypers[block.split.group])
        return Accumulation(
            block.host, block.host_shape, block.accumulator, first=block.count == 1
        )

    def _window_update(
        self, block: Block, gradients: StepGradients, hypers: Sequence[Hyper], step: int
    ) -> WindowUpdate:
        """Return the update that ends the block's window."""
        reads_staging = self._is_fused(step) and block.split in gradients.important
        has_sum = not self._sees_each and block.count > reads_staging
        return WindowUpdate(
            hyper=hypers[block.split.group],
            lr_scale=self._config.lr_scale(block.count),
            count=1 if self._sees_each else block.count,
            accumulator=block.accumulator if has_sum else None,
            reads_staging=reads_staging,
            prediction=self._calendar.lead(step) / block.count,
        )

    def _update(
        self,
        blocks: Sequence[Block],
        gradients: StepGradients,
        hypers: Sequence[Hyper],
        factor: HostValues,
        step: int,
        active: dict[int, Tensor],
    ) -> None:
        """Queue the updates of one bucket's windows that end, and let them be in flight."""
        if not blocks:
            return
        lag, is_fused = self._calendar.lag(step), self._is_fused(step)
        copied = gradients.copied.get(blocks[0].split.bucket, [])
        jobs = [
            Update(
                host=block.host,
                shape=block.host_shape,
                window=self._window_update(block, gradients, hypers, step),
                active=active[block.index],
                out=self._room_for(block),
            )
            for block in blocks
        ]
        done = self._worker.submit(
            "adam",
            parts_of(jobs, factor, self._pool),
            deadline=step + (min(lag, 1) if is_fused else lag),
            step=step,
            after=unique(
                [
                    *copied,
                    *(block.staging_free for block in blocks),
                    *(block.last_update for block in blocks),
                    *self._former_uploads,
                ]
            ),
        )
        for block, job in zip(blocks, jobs, strict=True):
            block.landing = Landing(
                block=block,
                values=job.out,
                buffer=self._buffer,
                land_step=step + lag,
                opened=self._calendar.opened[block.index],
                copied=copied if lag == 0 else (),
                computed=done,
            )
            if self._buffer is not None:
                self._buffer.num_open += 1
            block.last_update = done
            if is_fused:
                block.staging_free = done  # the update itself reads the staging
            if len(block.host.accumulators) > 1:
                block.accumulator = 1 - block.accumulator  # this one is still being read

    def _room_for(self, block: Block) -> Tensor:
        """Return the memory in which the block's update leaves its upload."""
        if self._buffer is None:
            return block.host.staging
        return carve(self._buffer, block.host_shape, block.split.param.dtype)


def _by_bucket(blocks: Iterable[Block]) -> dict[int, list[Block]]:
    """Group blocks by bucket, keeping their order."""
    groups: dict[int, list[Block]] = {}
    for block in blocks:
        groups.setdefault(block.split.bucket, []).append(block)
    return groups
