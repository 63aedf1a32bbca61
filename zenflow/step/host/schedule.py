"""Schedule of the host's work in a step: the blocks that accumulate, update and select."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from zenflow.columns.handover import hand_over
from zenflow.columns.layout import Block, Layout, by_bucket
from zenflow.columns.resizing import resize
from zenflow.config import ZenFlowConfig
from zenflow.device.base import AbstractDevice
from zenflow.lanes.completion import unique, wait_all
from zenflow.rule.calendar import WindowCalendar
from zenflow.step.host.changed import ChangedUploads
from zenflow.step.host.tasks import AbstractHostTasks
from zenflow.step.step import Step


@dataclass(eq=False, repr=False)
class HostSchedule:
    """Turns windows that end into host tasks and updates in flight."""

    layout: Layout
    config: ZenFlowConfig
    calendar: WindowCalendar
    tasks: AbstractHostTasks
    device: AbstractDevice
    wait_timeout: float
    changed: ChangedUploads | None = None
    """Blocks whose device takes no fresh steps; None where all weights are uploaded."""

    @property
    def _resizes(self) -> bool:
        """Whether every block gets another number of important columns in this step."""
        return self.layout.topk_ratio != self.calendar.knobs.topk_ratio

    def begin(self, step: Step) -> list[Block]:
        """Queue the host's work for a step, except for blocks that select at its end.

        `UploadGate.take_landings` has been called for this step.

        Returns:
            The blocks whose selection is due now; `select` finishes them.
        """
        blocks, buckets = self.layout.blocks, self.layout.buckets
        selects = self.calendar.selects(step.number)
        windows = self.tasks.windows
        for block, window in zip(blocks, windows, strict=True):
            window.wants_selection |= selects
            window.count += step.has_gradient(block)
        next_due = self.calendar.next_due
        due = [block for block in blocks if next_due[block.index] == step.number]
        ending = set(due)
        if self._resizes:
            for bucket in buckets:
                self.tasks.take_in(step, bucket, ending)
            return due
        updating = [b for b in due if windows[b.index].count and b.shape.num_deferred]
        self.tasks.take_buffer(step, updating)
        selecting = [b for b in due if windows[b.index].wants_selection and _can_select(b)]
        chosen = set(selecting)
        rest = by_bucket(block for block in updating if block not in chosen)
        opened = self._close_windows(step, [block for block in due if block not in chosen])
        for bucket in buckets:
            # Both kinds of work in one pass: a bucket's memory is free for the next gradients in
            # the order in which backward brings them.
            self.tasks.take_in(step, bucket, ending)
            members = rest.get(bucket.index, [])
            active = {block.index: self.tasks.all_active(block) for block in members}
            self.tasks.update(step, members, active, opened)
        self._begin_windows(step, [block for block in due if block not in chosen])
        return selecting

    def select(self, step: Step, blocks: Sequence[Block]) -> None:
        """Hand columns over in these blocks and start their updates; the last ones have landed."""
        wait_all(unique(self.tasks.users_of(blocks)), self.wait_timeout)
        if self._resizes:
            self._resize(step)
            return
        finish_rows = partial(self.tasks.finish_rows, step)
        hysteresis, shares = self.config.hysteresis, self.layout.shares
        active = hand_over(blocks, finish_rows, hysteresis, shares, self.device)
        if self.changed is not None:
            self.changed.forget(block for block in blocks if not active[block.index].all())
            self.changed.measure(blocks)
        opened = self._close_windows(step, blocks)
        counted = by_bucket(block for block in blocks if self.tasks.windows[block.index].count)
        for members in counted.values():
            self.tasks.update(step, members, active, opened)
        self._begin_windows(step, blocks)

    def _resize(self, step: Step) -> None:
        """Change to the ratio k in force: all windows end, columns move, and all are uploaded."""
        blocks = self.layout.blocks
        opened = {block.index: self.calendar.opened[block.index] for block in blocks}
        counted = [block for block in blocks if self.tasks.windows[block.index].count]
        self.tasks.flush(blocks, step=step)
        wait_all(unique(self.tasks.users_of(blocks)), self.wait_timeout)
        self.device.synchronize()  # copies have been waited for, but kernels read tensors too
        resize(self.layout, self.calendar.knobs.topk_ratio, self.config.hysteresis)
        self.tasks.renew()
        self.calendar.open_all([block.shape for block in blocks], step.number)
        updating = [block for block in counted if block.shape.num_deferred]
        self.tasks.take_buffer(step, updating)
        for members in by_bucket(updating).values():
            active = {block.index: self.tasks.all_active(block) for block in members}
            self.tasks.update(step, members, active, opened)
        self._begin_windows(step, blocks)

    def _close_windows(self, step: Step, blocks: Sequence[Block]) -> Mapping[int, int]:
        """End windows in the calendar; return the step after which each began, by block."""
        opened = {block.index: self.calendar.opened[block.index] for block in blocks}
        for block in blocks:
            self.calendar.close(block.index, step.number)
        return opened

    def _begin_windows(self, step: Step, blocks: Sequence[Block]) -> None:
        """Let the blocks' next windows begin."""
        if self.changed is not None:
            self.changed.begin_windows(step, blocks)
        for block in blocks:
            window = self.tasks.windows[block.index]
            window.count, window.wants_selection = 0, False


def _can_select(block: Block) -> bool:
    return block.shape.num_important > 0 and block.shape.num_deferred > 0
