"""Gradient queue: gradients that wait on the host until one pass applies them all.

A block's first gradient waits in its own staging buffer. Further ones wait in rooms of a pool that
all blocks share: blocks end their windows in turn, so that some have many gradients when others
have few. A block that finds no room has what waits applied, which frees its staging buffer.
"""

from __future__ import annotations

from bisect import bisect
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zenflow.columns.byte_memory import ByteMemory
from zenflow.columns.host_rows import aligned, room_bytes
from zenflow.device.base import AbstractDevice, HostValues
from zenflow.host.jobs import AdamStep
from zenflow.lanes.completion import Completion
from zenflow.lanes.lease import Lease
from zenflow.rule.adamw import Hyper


@dataclass(slots=True, eq=False)
class Room:
    """Bytes first..last-1 of the pool."""

    first: int
    """First byte, counted from the pool's beginning."""
    last: int
    """Byte after the last one, counted from the pool's beginning."""
    lease: Lease = field(default_factory=Lease)
    """Lease of the bytes."""


@dataclass(slots=True, eq=False)
class StagedGradient:
    """One block's gradient of one step on the host, or on its way there."""

    values: Tensor
    """Gradient, (D, length of a column) in its type on the host."""
    lease: Lease
    """Lease of the memory of `values`."""
    room: Room | None
    """Room of the pool that holds the gradient; None in the block's own staging buffer."""
    step: int = 0
    """Number of the step that the gradient is of."""
    hyper: Hyper | None = None
    """AdamW's settings in the gradient's step; None until the step is known to be good."""
    factor: HostValues | None = None
    """Measured values of the gradient's step, the factor on gradients first; None until the step
    is known to be good."""
    applied: float = 1.0
    """Part of that factor that the gradient has already."""

    def adam_step(self, rows: Tensor | None = None) -> AdamStep:
        """Return the AdamW step with this gradient, or with some of its rows, (n,) int64.

        Blocks until the factor is on the host.
        """
        assert self.hyper is not None
        assert self.factor is not None
        values = self.values if rows is None else self.values[rows]
        return adam_step(self.hyper, self.factor.get()[0] / self.applied, values)


def adam_step(hyper: Hyper, scale: float = 1.0, grad: Tensor | None = None) -> AdamStep:
    """Return an AdamW step of the host with a parameter group's settings."""
    return AdamStep(
        lr=hyper.lr,
        beta1=hyper.beta1,
        beta2=hyper.beta2,
        eps=hyper.eps,
        decay=1.0 - hyper.lr * hyper.weight_decay,
        scale=scale,
        grad=grad,
    )


class RoomPool:
    """Pinned memory in rooms of any size, the first that fits first.

    A room is free from the call that gives it back, even while work on it goes on: its lease names
    that work to whoever takes its bytes next. So the same rooms are taken whatever the timing.
    Rooms that lie side by side are one gap, in which each keeps its own lease: a gradient waits
    for the work on its own bytes alone.
    """

    def __init__(self, device: AbstractDevice, num_bytes: int) -> None:
        """Allocate the pool's bytes, of which there may be none."""
        self.num_bytes = num_bytes
        """Bytes of all rooms together."""
        self.memory = ByteMemory(device.pinned_slab(aligned(num_bytes), torch.uint8))
        self.clear()

    def clear(self) -> None:
        """Take all rooms back; no work may use one of them."""
        whole = [deque([Room(0, self.num_bytes)])] if self.num_bytes else []
        self._gaps: list[deque[Room]] = whole

    def take(self, shape: tuple[int, int], like: Tensor) -> tuple[Tensor, Room] | None:
        """Return a matrix of this shape and `like`'s dtype, and its room; None if none is free."""
        size = room_bytes(shape[0] * shape[1], like.dtype)
        for index, gap in enumerate(self._gaps):
            first, last = gap[0].first, gap[0].first + size
            if gap[-1].last < last:
                continue
            users: list[Completion] = []
            while gap and gap[0].first < last:
                free = gap.popleft()
                users += free.lease.users
                if free.last > last:
                    gap.appendleft(Room(last, free.last, Lease(free.lease.users)))
            if not gap:
                del self._gaps[index]
            return self.memory.matrix(first, shape, like.dtype), Room(first, last, Lease(users))
        return None

    def give(self, room: Room) -> None:
        """Take a room back; its lease goes on listing whoever still uses it."""
        place = bisect(self._gaps, room.first, key=lambda gap: gap[0].first)
        self._gaps.insert(place, deque([room]))
        for index in (place, place - 1):  # neighbours become one gap
            if 0 <= index < len(self._gaps) - 1:
                left, right = self._gaps[index : index + 2]
                if left[-1].last == right[0].first:
                    left += right
                    del self._gaps[index + 1]
