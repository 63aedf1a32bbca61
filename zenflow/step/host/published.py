"""The host's tasks of the published rule: sums of gradients, and one AdamW step on their mean.

ZenFlow's accumulation (arXiv 2505.12242), for comparisons.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from zenflow.columns.device_rows import Resident
from zenflow.columns.gradient_queue import StagedGradient, adam_step
from zenflow.columns.host_rows import HostRows
from zenflow.columns.host_update import RowWork, catch_up
from zenflow.columns.layout import Block, Bucket, Layout, SplitParam
from zenflow.config import ZenFlowConfig
from zenflow.device.base import HostValues
from zenflow.host import kernel
from zenflow.host import memory as host_memory
from zenflow.host.jobs import AdamStep, HostJob, SumJob, Upload
from zenflow.lanes.completion import Completion
from zenflow.rule.adamw import Hyper
from zenflow.step.host.tasks import AbstractHostTasks, Step, WindowWork


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

    @property
    def host_bytes(self) -> int:
        """Bytes of the tasks' host memory, without the rows."""
        return sum(tensor.nbytes for by_split in self.sums for tensor in by_split.values())

    @property
    def pinned_bytes(self) -> int:
        """Bytes of `host_bytes` that are pinned where the device is a GPU."""
        return 0

    def renew(self) -> None:
        """Follow a resizing of all blocks, whose windows begin anew."""
        self._parts: dict[Block, list[Tensor]] = {}
        for split in self.layout.splits:
            sizes = [block.shape.num_deferred for block in split.blocks]
            cuts = [by_split[split][: sum(sizes)].split(sizes) for by_split in self.sums]
            for index, block in enumerate(split.blocks):
                self._parts[block] = [cut[index] for cut in cuts]

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
        staged = StagedGradient(block.host.staging, None, after=[block.staging_free])
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
        done = self.submit(
            "accumulate",
            [
                RowWork(
                    block.host_shape,
                    partial(
                        _sum,
                        self._sum_of(block),
                        block.host.staging,
                        step.values,
                        block.count == 1,
                    ),
                )
                for block in blocks
            ],
            step=step.number,
            deadline=step.number + 1,  # the next backward brings new gradients into the staging
            bucket=bucket.index,
            after=[*step.copies_of(bucket.index), *(block.staging_free for block in blocks)],
        )
        for block in blocks:
            block.staging_free = done

    def _is_direct(self, step: Step, block: Block) -> bool:
        """Whether the window's only gradient is used where it is staged.

        The staging is then free only once the update is over, which must be before the next step.
        """
        return block.count == 1 and step.lag <= 1 and step.has_gradient(block)

    def _sum_of(self, block: Block) -> Tensor:
        return self._parts[block][block.accumulator]

    def _gradients(self, step: Step, block: Block) -> tuple[Tensor, HostValues | None] | None:
        """Return the window's sum or its only gradient, with the values of that one's step."""
        if not block.count:
            return None
        if self._is_direct(step, block):
            return block.host.staging, step.values
        return self._sum_of(block), None

    def window_work(self, step: Step, block: Block, active: Tensor, out: Tensor) -> WindowWork:
        """Return the AdamW step on the window's mean."""
        hyper = step.hyper_of(block)
        upload = Upload(out=out, lead=0.0, step=adam_step(hyper), repeats_last=False)
        found = self._gradients(step, block)
        make = partial(_step_on_mean, block.host, active, found, block.count, hyper, upload)
        is_direct = found is not None and found[1] is not None
        copies = step.copies_of(block.split.bucket) if is_direct or step.lag == 0 else []
        after = [*copies, block.staging_free]
        return WindowWork(block, out, RowWork(block.host_shape, make), after)

    def window_ended(self, step: Step, block: Block, done: Completion) -> None:
        """Let the next window use the other sum, if any, while the update reads this one."""
        if step.lag == 0 or self._is_direct(step, block):
            block.staging_free = done
        if len(self.sums) > 1:
            block.accumulator = 1 - block.accumulator

    def finish_rows(self, step: Step, block: Block, rows: Tensor) -> HostRows:
        """Return copies of some rows, stepped by the window's mean."""
        leaving = block.host.rows(rows)
        found = self._gradients(step, block)
        if found is not None:
            found = found[0][rows], found[1]
        active = torch.ones(len(rows), dtype=torch.uint8, device="cpu")
        hyper = step.hyper_of(block)
        kernel.run(_step_on_mean(leaving, active, found, block.count, hyper, None))
        return leaving

    def flush(self, blocks: Iterable[Block], *, step: Step | None = None) -> None:
        """Queue the AdamW steps of windows that end; between two steps nothing waits."""
        if step is None:
            return
        for block in blocks:
            found = self._gradients(step, block)
            count, block.count = block.count, 0  # also where no column has been the host's so far
            if found is None or not block.shape.num_deferred:
                continue
            hyper, active = step.hyper_of(block), self.all_active(block)
            make = partial(_step_on_mean, block.host, active, found, count, hyper, None)
            block.last_update = block.staging_free = self.submit(
                "adam",
                [RowWork(block.host_shape, make)],
                step=step.number,
                deadline=step.number,
                bucket=block.split.bucket,
                after=[
                    *step.copies_of(block.split.bucket),
                    *(block.staging_free, block.last_update),
                ],
            )


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
            sum(split.slab_rows.master.numel() for split in layout.splits), torch.float32
        )
        parts = slab.split([split.slab_rows.master.numel() for split in layout.splits])
        shapes = [split.slab_rows.master.shape for split in layout.splits]
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
    found: tuple[Tensor, HostValues | None] | None,
    count: int,
    hyper: Hyper,
    upload: Upload | None,
) -> HostJob:
    """Return the AdamW step on a sum of `count` gradients, or on one gradient, not scaled yet."""
    steps: list[AdamStep] = []
    if found is not None:
        grad, values = found
        steps = [adam_step(hyper, 1.0 / count if values is None else values.get()[0], grad)]
    return catch_up(host, active, steps, upload)
