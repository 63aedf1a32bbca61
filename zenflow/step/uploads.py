"""The landing strip: releases uploads when weights are free, waits for what must have landed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from zenflow.lanes.completion import Completion
from zenflow.lanes.copies import Copy

if TYPE_CHECKING:
    from zenflow.columns.layout import Block, Landing
    from zenflow.device.base import AbstractDevice
    from zenflow.device.stalls import StallClock
    from zenflow.lanes.copies import CopyLane
    from zenflow.rule.calendar import WindowCalendar


def unique(completions: Iterable[Completion | None]) -> list[Completion]:
    """Return each completion once, in order."""
    return list({id(c): c for c in completions if c is not None}.values())


class LandingStrip:
    """Releases uploads when weights are free, and waits for those that must have landed."""

    def __init__(
        self,
        device: AbstractDevice,
        lane: CopyLane,
        stalls: StallClock,
        calendar: WindowCalendar,
        wait_timeout: float,
    ) -> None:
        """Wire up; the optimizer owns all of these."""
        self._device = device
        self._lane = lane
        self._stalls = stalls
        self._calendar = calendar
        self._wait_timeout = wait_timeout

    def lands(self, block: Block, step: int) -> bool:
        """Whether the block's update in flight lands in this step.

        It does at its landing step, and at the latest when the block's next window ends.
        """
        return block.landing is not None and (
            block.landing.land_step == step or self._calendar.is_due(block.index, step)
        )

    def release(self, blocks: Iterable[Block], mark: Any, step: int) -> None:
        """Queue the upload of what lands in this step, from blocks whose weights are not in use.

        Args:
            blocks: Any blocks; those with nothing to land are passed over.
            mark: The device's position after the last use of the weights.
            step: The step under way.
        """
        landings = [
            block.landing
            for block in blocks
            if block.landing is not None
            and block.landing.uploaded is None
            and self.lands(block, step)
        ]
        if not landings:
            return
        done = Completion(f"the upload of step {step} (h2d)")
        jobs = []
        for landing in landings:
            landing.uploaded = done
            if landing.buffer is not None:
                landing.buffer.uploads.append(done)
            split = landing.block.split
            jobs.append((landing.values, landing.block.deferred_columns, split.weight()))
        device = self._device
        self._lane.submit(
            Copy(
                run=lambda: device.unpack(jobs, mark),
                after=unique(landing.computed for landing in landings),
                done=done,
                num_bytes=sum(landing.num_bytes for landing in landings),
                step=step,
            )
        )

    def collect(self, blocks: Iterable[Block], step: int) -> list[Landing]:
        """Take what lands in this step off its blocks; all of it has been released."""
        landings = []
        for block in blocks:
            landing = block.landing
            if landing is not None and self.lands(block, step):
                landings.append(landing)
                if landing.buffer is not None:
                    landing.buffer.num_open -= 1
                block.landing = None
        return landings

    def wait(self, landings: Sequence[Landing]) -> None:
        """Let the next forward see these updates; what is not there yet is stall."""
        if not landings:
            return
        with self._stalls.waiting("d2h"):
            for completion in unique(c for x in landings for c in x.copied):
                completion.wait(self._wait_timeout)
        with self._stalls.waiting("host"):
            for completion in unique(x.computed for x in landings):
                completion.wait(self._wait_timeout)
        with self._stalls.waiting("h2d"):
            for completion in unique(x.uploaded for x in landings):
                completion.wait_set(self._wait_timeout)
                self._device.order_after(completion)
