"""Sums of gradients that go home between a step's micro-batches.

A full card has no room for a gradient of every streamed weight. When the backward of a page's
layer is over, the sums so far go to pinned host memory, and they come back before the layer's next
backward, which adds to them. So the additions are those of any other step, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zenflow.lanes.completion import Completion
from zenflow.lanes.copies import Copy, CopyLane
from zenflow.lanes.lease import take
from zenflow.streaming.page import Page
from zenflow.streaming.stream import backward_number

if TYPE_CHECKING:
    from zenflow.columns.layout import SplitParam
    from zenflow.streaming.stream import WeightStream


@dataclass(eq=False)
class _PageSums:
    """The sums of one page."""

    homes: dict[SplitParam, Tensor]
    """Pinned memory of each sum."""
    arrived: set[SplitParam] = field(default_factory=set)
    """Parameters whose gradients have come in the present backward."""
    backward: int = -1
    """Number of the present backward."""
    are_home: bool = False
    """Whether the sums so far are at home."""
    coming: tuple[Completion, dict[SplitParam, Tensor]] | None = None
    """The copy back, and the device's tensors; None where no copy is under way."""


class GradientSums:
    """Sends pages' sums home, and brings them back."""

    def __init__(
        self,
        stream: WeightStream,
        pages: dict[Page, list[SplitParam]],
        released: dict[Any, Tensor],
        swapped: Callable[[SplitParam], None],
        *,
        wait_timeout: float,
    ) -> None:
        """Start without a sum.

        Args:
            stream: Lanes that move the sums.
            pages: Trained parameters of each page.
            released: Tensor that stands in `.grad` for a gradient that is elsewhere.
            swapped: Called with a parameter whose `.grad` has become another tensor.
            wait_timeout: Seconds after which a wait is an error.
        """
        self._stream, self._pages = stream, pages
        self._released, self._swapped = released, swapped
        self._wait_timeout = wait_timeout
        self._sums: dict[Page, _PageSums] = {}

    def came(self, split: SplitParam) -> None:
        """Note a gradient of a micro-batch that is not the step's last."""
        page = split.page
        assert page is not None
        sums = self._sums.get(page)
        if sums is None:
            homes = {own: page.sum_at_home(own.param) for own in self._pages[page]}
            sums = self._sums[page] = _PageSums(homes)
        if sums.backward != backward_number():  # the one before has left some out
            sums.backward = backward_number()
            sums.arrived.clear()
        sums.arrived.add(split)
        if len(sums.arrived) == len(self._pages[page]):
            sums.arrived.clear()
            self._send(page, sums)

    def _send(self, page: Page, sums: _PageSums) -> None:
        stream = self._stream
        device, mark = stream.device, stream.device.mark()
        jobs = []
        for split, home in sums.homes.items():
            grad = split.param.grad
            assert grad is not None
            jobs.append((grad, home))
            split.param.grad = self._released[split]
            self._swapped(split)

        def run() -> Any:
            span = device.transfer(stream.down.name, jobs, mark)
            device.keep([grad for grad, _ in jobs], stream.down.name)
            return span

        page.sums_lease.renew()
        done = Completion(f"the gradients' sums of layer {page.index} ({stream.down.name})")
        self._submit(stream.down, run, done, take(done, fills=[page.sums_lease]), sums)
        sums.are_home = True
        stream.leave(page)

    def _submit(
        self,
        lane: CopyLane,
        run: Callable[[], Any],
        done: Completion,
        after: list[Completion],
        sums: _PageSums,
    ) -> None:
        num_bytes = sum(home.nbytes for home in sums.homes.values())
        lane.submit(Copy(run, after, done, num_bytes, self._stream.step))
        self._stream.count(lane, num_bytes)

    def fetch(self, page: Page) -> None:
        """Start to bring a page's sums back, unless they are here or on their way."""
        sums = self._sums.get(page)
        if sums is None or not sums.are_home or sums.coming is not None:
            return
        stream = self._stream
        there = {split: torch.empty_like(page.device_tensor(split.param)) for split in sums.homes}
        jobs = [(home, there[split]) for split, home in sums.homes.items()]
        mark = stream.device.mark()
        done = Completion(f"the gradients' sums of layer {page.index} ({stream.up.name})")
        self._submit(
            stream.up,
            lambda: stream.device.transfer(stream.up.name, jobs, mark),
            done,
            take(done, reads=[page.sums_lease]),
            sums,
        )
        sums.coming = done, there

    def restore(self, page: Page) -> None:
        """Put a page's sums back into `.grad`, but for those that somebody has dropped."""
        self.fetch(page)
        sums = self._sums.get(page)
        if sums is None or sums.coming is None:
            return
        (done, there), sums.coming = sums.coming, None
        sums.are_home = False
        with self._stream.waiting():
            done.wait_launched(self._wait_timeout)
            self._stream.device.order_after(done)
        for split, grad in there.items():
            if split.param.grad is self._released[split]:
                split.param.grad = grad
                self._swapped(split)

    def has_home(self, page: Page) -> bool:
        """Whether a page's sums are at home."""
        return page in self._sums and self._sums[page].are_home

    def forget(self) -> None:
        """Drop all sums, of a step that is not taken."""
        for sums in self._sums.values():
            sums.arrived.clear()
            sums.are_home, sums.coming = False, None
