"""Sums of gradients that wait on the host between a step's micro-batches.

A full card has no room for a gradient of every weight. When backward has added a micro-batch's
gradient, the sum so far goes to pinned host memory. The sum comes back just before backward adds
the next one. So the additions are those of any other step, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

from zenflow.columns.layout import SplitParam
from zenflow.lanes.completion import Completion
from zenflow.lanes.lease import Lease
from zenflow.rule.sizes import SUMS_AHEAD_BYTES
from zenflow.streaming.stream import backward_number

if TYPE_CHECKING:
    from zenflow.columns.device_rows import Resident
    from zenflow.step.engine import Engine


@dataclass(eq=False)
class _Sum:
    """The sum of one parameter's gradients."""

    home: Tensor
    """Pinned memory of the sum, of the gradient's shape and dtype."""
    lease: Lease = field(default_factory=Lease)
    """Users of that memory."""
    is_home: bool = False
    """Whether the sum so far is at home."""
    coming: tuple[Completion, Tensor] | None = None
    """The copy back, and its target on the device; None where no copy is under way."""


class GradientSums:
    """Sends sums to the host, and brings them back in the order in which backward needs them."""

    def __init__(
        self,
        engine: Engine,
        released: dict[SplitParam | Resident, Tensor],
        swapped: Callable[[SplitParam], None],
    ) -> None:
        """Start without a sum.

        Args:
            engine: Engine with lanes for sums.
            released: Tensor that stands in `.grad` for a gradient that is elsewhere.
            swapped: Called with a parameter whose `.grad` has become another tensor.
        """
        assert engine.transfers is not None
        self._device, self._transfers = engine.device, engine.transfers
        self._pages = engine.layout.pages
        self._sends_all = engine.options.offload_sums
        self._released, self._swapped = released, swapped
        self._sums: dict[SplitParam, _Sum] = {}
        self._following: dict[SplitParam, SplitParam] = {}  # by the last order of arrivals
        self._came: dict[SplitParam, None] = {}
        self._backward = -1
        self._coming_bytes = 0
        self._fetched: SplitParam | None = None

    def have(self, place: SplitParam | Resident) -> TypeGuard[SplitParam]:
        """Whether a parameter's sums go home: it is split, and its weights visit or all do."""
        return isinstance(place, SplitParam) and (place.page is not None or self._sends_all)

    def came(self, split: SplitParam) -> None:
        """Send a sum home, to which a micro-batch that is not the step's last has added."""
        if self._backward != backward_number():
            self._backward = backward_number()
            self._came.clear()
        elif self._came:
            self._following[next(reversed(self._came))] = split
        self._came[split] = None
        self._send(split)
        if split.page is not None and self._have_come(self._pages[split.page]):
            split.page.stream.leave(split.page)

    def _have_come(self, splits: Collection[SplitParam]) -> bool:
        return all(split in self._came for split in splits)

    def _send(self, split: SplitParam) -> None:
        grad = split.param.grad
        assert grad is not None
        waiting = self._sums.get(split)
        if waiting is None:
            slab = self._device.pinned_slab(grad.numel(), grad.dtype)
            waiting = self._sums[split] = _Sum(slab.view(grad.shape))
        waiting.lease.renew()
        self._transfers.submit(
            *(self._transfers.down, f"the sum of gradients of {split.name}"),
            [(grad, waiting.home)],
            after=self._device.mark(),
            fills=[waiting.lease],
            keeps=[grad],
        )
        waiting.is_home = True
        split.param.grad = self._released[split]
        self._swapped(split)

    def _fetch(self, split: SplitParam) -> bool:
        """Start to bring a sum back; return whether it was at home."""
        waiting = self._sums.get(split)
        if waiting is None or not waiting.is_home or waiting.coming is not None:
            return False
        page = split.page
        like = split.data if page is None else page.device_tensor(split.param)
        there = torch.empty_like(like, requires_grad=False)
        done = self._transfers.submit(
            *(self._transfers.up, f"the sum of gradients of {split.name}"),
            [(waiting.home, there)],
            after=self._device.mark(),
            reads=[waiting.lease],
            keeps=[there],
        )
        waiting.coming = done, there
        self._coming_bytes += there.nbytes
        return True

    def _fetch_following(self, split: SplitParam) -> None:
        """Let the sums that backward needs next be on their way."""
        last = self._fetched
        if last is None or self._sums[last].coming is None:
            last = split
        while self._coming_bytes < SUMS_AHEAD_BYTES:
            following = self._following.get(last)
            if following is None or not self._fetch(following):
                break
            last = following
        self._fetched = last

    def restore(self, split: SplitParam) -> None:
        """Put a sum back into `.grad` before backward adds to it, unless somebody has dropped it.

        The sums of the parameters that are next come meanwhile.
        """
        self._fetch(split)
        waiting = self._sums.get(split)
        if waiting is None or waiting.coming is None:
            return
        (done, there), waiting.coming = waiting.coming, None
        self._coming_bytes -= there.nbytes
        waiting.is_home = False
        self._fetch_following(split)
        self._transfers.wait(done)
        if split.param.grad is self._released[split]:
            split.param.grad = there
            self._swapped(split)

    def forget(self) -> None:
        """Drop all sums, of a step that is not taken."""
        for waiting in self._sums.values():
            waiting.is_home, waiting.coming = False, None
        self._came.clear()
        self._coming_bytes = 0
