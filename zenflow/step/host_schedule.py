"""What the host does with a step's gradients: which blocks accumulate, update, select."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from zenflow.columns.handover import hand_over, resize
from zenflow.columns.host_update import WindowUpdate
from zenflow.columns.layout import Block, Layout, by_bucket
from zenflow.config import ZenFlowConfig
from zenflow.device.base import AbstractDevice
from zenflow.lanes.completion import wait_all
from zenflow.rule.calendar import WindowCalendar
from zenflow.step.host_tasks import HostTasks, Step


@dataclass(eq=False, repr=False)
class HostSchedule:
    """Turns windows that end into host tasks and landings."""

    layout: Layout
    config: ZenFlowConfig
    calendar: WindowCalendar
    tasks: HostTasks
    device: AbstractDevice
    wait_timeout: float

    def __post_init__(self) -> None:
        """Take note of the blocks' numbers of rows."""
        self.renew()

    def renew(self) -> None:
        """Take note that blocks have got other numbers of rows."""
        self._all_active = {
            block.index: torch.ones(block.shape.num_deferred, dtype=torch.uint8)
            for block in self.layout.blocks
        }

    @property
    def _resizes(self) -> bool:
        """Whether every block gets another number of important columns in this step."""
        return self.layout.topk_ratio != self.calendar.knobs.topk_ratio

    def begin(self, step: Step) -> list[Block]:
        """Queue the host's work for a step, but for the blocks that select at its end.

        Every landing of this step has been taken.

        Returns:
            The blocks whose selection is due now; `select` finishes them.
        """
        blocks, buckets = self.layout.blocks, self.layout.buckets
        selects = self.calendar.selects(step.number)
        for block in blocks:
            block.wants_selection |= selects
            block.count += step.has_gradient(block)
        next_due = self.calendar.next_due
        due = [block for block in blocks if next_due[block.index] == step.number]
        skipped = set(due) if self.tasks.is_fused(step) else set()
        if self._resizes:
            for bucket in buckets:
                self.tasks.accumulate(step, bucket, skipped)
            return due
        updating = [block for block in due if block.count and block.shape.num_deferred]
        self.tasks.take_buffer(step, updating)
        selecting = [block for block in due if block.wants_selection and _can_select(block)]
        chosen = set(selecting)
        rest = by_bucket(block for block in updating if block not in chosen)
        for bucket in buckets:
            # Both kinds of work in one pass: a bucket's staging is free for the next gradients in
            # the order in which backward brings them.
            self.tasks.accumulate(step, bucket, skipped)
            self.tasks.update(step, rest.get(bucket.index, []), self._all_active)
        for block in due:
            if block not in chosen:
                self._close(step, block)
        return selecting

    def select(self, step: Step, blocks: Sequence[Block]) -> None:
        """Hand columns over in these blocks and start their updates; the last landing is over."""
        for block in blocks:
            copies = step.copies_of(block.split.bucket)
            wait_all([*copies, block.staging_free, block.last_update], self.wait_timeout)
        updates = {
            block.index: self.tasks.window_update(step, block) for block in blocks if block.count
        }
        if self._resizes:
            self._resize(step, updates)
            return
        active = {
            block.index: hand_over(
                block, updates.get(block.index), step.factor, self.config.hysteresis
            )
            for block in blocks
        }
        for members in by_bucket(block for block in blocks if block.count).values():
            self.tasks.update(step, members, active)
        for block in blocks:
            self._close(step, block)

    def _resize(self, step: Step, updates: Mapping[int, WindowUpdate]) -> None:
        """Go over to the ratio in force, start all windows' updates and open new windows."""
        blocks = self.layout.blocks
        self.device.synchronize()  # copies have been waited for, but kernels read tensors too
        ratio = self.calendar.knobs.topk_ratio
        active = resize(self.layout, ratio, self.config.hysteresis, updates, step.factor)
        self.renew()
        updating = [block for block in blocks if block.count and block.shape.num_deferred]
        self.tasks.take_buffer(step, updating)
        for members in by_bucket(updating).values():
            self.tasks.update(step, members, active)
        self.calendar.open_all([block.shape for block in blocks], step.number)
        for block in blocks:
            block.count = 0
            block.wants_selection = False

    def _close(self, step: Step, block: Block) -> None:
        block.count = 0
        block.wants_selection = False
        self.calendar.close(block.index, step.number)


def _can_select(block: Block) -> bool:
    return block.shape.num_important > 0 and block.shape.num_deferred > 0
