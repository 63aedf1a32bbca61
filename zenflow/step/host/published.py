"""The host's tasks of the published rule: sums of gradients, and one AdamW step on their mean.

ZenFlow's accumulation (arXiv 2505.12242), for comparisons.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from zenflow.columns.device_rows import Resident
from zenflow.columns.gradient_queue import StagedGradient, adam_step
from zenflow.columns.host_rows import HostRows
from zenflow.columns.host_update import RowWork, catch_up, stepped
from zenflow.columns.layout import Block, Bucket, Layout, SplitParam
from zenflow.config import ZenFlowConfig
from zenflow.device.base import HostValues
from zenflow.host import memory as host_memory
from zenflow.host.jobs import AdamStep, HostJob, SumJob, Upload
from zenflow.lanes.lease import Lease
from zenflow.rule.adamw import Hyper
from zenflow.step.host.tasks import AbstractHostTasks, WindowWork
from zenflow.step.step import Step


@dataclass(eq=False, repr=False)
class PublishedTasks(AbstractHostTasks):
    """Adds up a window's gradients, and takes one AdamW step on their mean at the window's end."""

    sums: list[dict[SplitParam, Tensor]]
    """Sums of open windows by parameter, float32, of the shape of its `slab_rows`.

    Two sums where the window before may still be read when new gradients arrive; none where a
    window is one step.
    """

    def __post_init__(self) -> None:
        """Cut the sums for the blocks."""
        self._staged: dict[Block, StagedGradient] = {}
        self.renew()
        super().__post_init__()

    @property
    def host_bytes(self) -> int:
        """Bytes of the tasks' host memory, without the rows."""
        return sum(tensor.nbytes for by_split in self.sums for tensor in by_split.values())

    @property
    def pinned_bytes(self) -> int:
        """Bytes of `host_bytes` that are pinned where the device is a GPU."""
        return 0

    def renew(self) -> None:
        """Follow a resizing of all blocks; no gradient waits."""
        self._parts: dict[Block, list[tuple[Tensor, Lease]]] = {}
        for split in self.layout.splits:
            sizes = [block.shape.num_deferred for block in split.blocks]
            cuts = [by_split[split][: sum(sizes)].split(sizes) for by_split in self.sums]
            for index, block in enumerate(split.blocks):
                self._parts[block] = [(cut[index], Lease()) for cut in cuts]

    def leases_of(self, block: Block) -> list[Lease]:
        """Return the leases of the block's rows, staging and sums."""
        return [*super().leases_of(block), *(lease for _, lease in self._parts[block])]

    def param_state(self, place: SplitParam | Resident) -> dict[str, Tensor]:
        """Return the sums of a parameter's open windows."""
        if isinstance(place, Resident):
            return {}
        count = len(place.deferred_columns)
        return {
            f"accumulator_{index}": by_split[place][:count]
            for index, by_split in enumerate(self.sums)
        }

    def stage(self, block: Block) -> StagedGradient:
        """Return where a block's gradient of the step under way is to be copied."""
        lease = self.staging[block.index]
        lease.renew()
        staged = StagedGradient(block.host.staging, lease, None)
        self._staged[block] = staged
        return staged

    def drop(self, blocks: Iterable[Block]) -> None:
        """Forget these blocks' gradients; later copies overwrite the dropped ones in staging."""
        for block in blocks:
            self._staged.pop(block, None)

    def take_in(self, step: Step, bucket: Bucket, due: Collection[Block]) -> None:
        """Add a bucket's gradients to their sums, but for windows of one step that are due."""
        blocks = [block for block in bucket.blocks if self._staged.pop(block, None) is not None]
        blocks = [b for b in blocks if not (b in due and self._is_direct(step, b))]
        if not blocks:
            return
        sums = [self._sum_of(block) for block in blocks]
        works = [
            RowWork(
                block.host_shape,
                partial(_sum, total, block.host.staging, step.values, self._count(block) == 1),
            )
            for block, (total, _) in zip(blocks, sums, strict=True)
        ]
        self.submit(
            "accumulate",
            works,
            step=step.number,
            deadline=step.number + 1,  # the next backward brings new gradients into the staging
            bucket=bucket.index,
            reads=[self.staging[block.index] for block in blocks],
            changes=[lease for _, lease in sums],
        )

    def _count(self, block: Block) -> int:
        return self.windows[block.index].count

    def _is_direct(self, step: Step, block: Block) -> bool:
        """Whether the window's only gradient is used where it is staged.

        The staging is then free only once the update is over, which must be before the next step.
        """
        return self._count(block) == 1 and step.lag <= 1 and step.has_gradient(block)

    def _sum_of(self, block: Block) -> tuple[Tensor, Lease]:
        return self._parts[block][self.accumulators[block.index]]

    def _gradients(self, step: Step, block: Block) -> _Gradients | None:
        """Return the window's sum or its only gradient; None for a window without any."""
        if not self._count(block):
            return None
        if self._is_direct(step, block):
            return _Gradients(block.host.staging, self.staging[block.index], step.values)
        return _Gradients(*self._sum_of(block), None)

    def window_work(
        self, step: Step, block: Block, active: Tensor, out: Tensor, lease: Lease
    ) -> WindowWork:
        """Return the AdamW step on the window's mean."""
        hyper = step.hyper_of(block)
        upload = Upload(out=out, lead=0.0, step=adam_step(hyper), repeats_last=False)
        found = self._gradients(step, block)
        make = partial(_step_on_mean, block.host, active, found, self._count(block), hyper, upload)
        reads = [] if found is None else [found.lease]
        return WindowWork(block, out, lease, RowWork(block.host_shape, make), reads)

    def window_ended(self, step: Step, block: Block) -> None:
        """Let the next window use the other sum, if any, while the update reads this one."""
        if len(self.sums) > 1:
            self.accumulators[block.index] = 1 - self.accumulators[block.index]

    def finish_rows(
        self, step: Step, block: Block, rows: Tensor, numbers: Sequence[Tensor]
    ) -> Tensor:
        """Copy some rows, stepped by the window's mean."""
        found = self._gradients(step, block)
        if found is not None:
            found = replace(found, values=found.values[rows])
        steps = _steps_on_mean(found, self._count(block), step.hyper_of(block))
        return stepped(block.host.copied(rows, numbers), steps, self.pool)

    def flush(self, blocks: Iterable[Block], *, step: Step | None = None) -> None:
        """Queue the AdamW steps of windows that end; between two steps nothing waits."""
        if step is None:
            return
        for block in blocks:
            found, window = self._gradients(step, block), self.windows[block.index]
            count, window.count = (
                window.count,
                0,
            )  # also where no column has been the host's so far
            if found is None or not block.shape.num_deferred:
                continue
            hyper, active = step.hyper_of(block), self.all_active(block)
            make = partial(_step_on_mean, block.host, active, found, count, hyper, None)
            self.submit(
                "adam",
                [RowWork(block.host_shape, make)],
                step=step.number,
                deadline=step.number,
                bucket=block.split.bucket,
                reads=[found.lease],
                changes=[self.rows[block.index]],
            )


@dataclass(frozen=True, slots=True)
class _Gradients:
    """A window's gradients: their sum, or the only one."""

    values: Tensor
    """Sum, float32, or gradient in the parameter's dtype, (D, O)."""
    lease: Lease
    """Lease of the memory of `values`."""
    measured: HostValues | None
    """Measured values of the only gradient's step, the factor first; None for a sum."""


def make_sums(
    layout: Layout, config: ZenFlowConfig, largest_interval: int
) -> list[dict[SplitParam, Tensor]]:
    """Return the sums that the longest window needs, of the shape of each parameter's `slab_rows`.

    No sum where every window is one step; one where an update ends inside its own step; else two.
    """
    count = 0 if largest_interval == 1 else 1 if not config.overlap_step else 2
    sums = []
    for _ in range(count):
        slab = host_memory.zeroed(
            sum(split.slab_rows.shape.numel() for split in layout.splits), torch.float32
        )
        parts = slab.split([split.slab_rows.shape.numel() for split in layout.splits])
        shapes = [split.slab_rows.shape for split in layout.splits]
        sums.append(
            {
                split: part.view(shape)
                for split, part, shape in zip(layout.splits, parts, shapes, strict=True)
            }
        )
    return sums


def _sum(total: Tensor, grad: Tensor, values: HostValues, is_first: bool) -> HostJob:
    return SumJob(total, grad, values.get()[0], is_first)


def _step_on_mean(
    host: HostRows,
    active: Tensor,
    found: _Gradients | None,
    count: int,
    hyper: Hyper,
    upload: Upload | None,
) -> HostJob:
    return catch_up(host, active, _steps_on_mean(found, count, hyper), upload)


def _steps_on_mean(found: _Gradients | None, count: int, hyper: Hyper) -> list[AdamStep]:
    """Return the AdamW step on a sum of `count` gradients, or on one gradient, not scaled yet."""
    if found is None:
        return []
    scale = 1.0 / count if found.measured is None else found.measured.get()[0]
    return [adam_step(hyper, scale, found.values)]
