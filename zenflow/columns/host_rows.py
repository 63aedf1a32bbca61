"""Host memory of the deferred columns: slabs allocated once, and each block's views of them.

A split parameter's host side is laid out column by column, (D, O) for D deferred columns: a column
is one contiguous row, moving a column is a row copy, and Adam's step count is per row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zenflow.device.base import AbstractDevice
from zenflow.lanes.completion import Completion

ROW_STATE = ("step", "master", "exp_avg", "exp_avg_sq")
"""What goes along when a column changes owner; host rows and banks have it under these names."""

ALIGNMENT = 64
"""Bytes; buffers of blocks start on cache lines."""


@dataclass(slots=True, eq=False)
class HostRows:
    """Host-owned columns as rows, float32 unless said otherwise.

    `exp_avg`, `exp_avg_sq` and `step` are AdamW's state in torch's names.
    """

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    """Adam steps taken by each row, shape (D,), int64."""
    accumulators: list[Tensor]
    """Sums of the open window's gradients; a second one where the window before may still be read
    when new gradients arrive, which takes a lag of 2 or more."""
    staging: Tensor
    """Gradients of the last step, in the parameter's dtype; pinned on a GPU."""

    def rows(self, first: int, last: int) -> HostRows:
        """Return the views of rows first..last-1."""
        part = slice(first, last)
        return HostRows(
            master=self.master[part],
            exp_avg=self.exp_avg[part],
            exp_avg_sq=self.exp_avg_sq[part],
            step=self.step[part],
            accumulators=[accumulator[part] for accumulator in self.accumulators],
            staging=self.staging[part],
        )


class HostSlabs:
    """The large allocations, one of each kind for the whole model, handed out in pieces."""

    def __init__(
        self,
        device: AbstractDevice,
        shapes: Sequence[tuple[int, int, torch.dtype]],
        num_accumulators: int,
    ) -> None:
        """Allocate for (D, O, dtype) of each split parameter, D the most columns it may defer."""
        elements = sum(columns * rows for columns, rows, _ in shapes)
        staging_bytes = sum(_aligned(c * r * dtype.itemsize) for c, r, dtype in shapes)
        self._float32 = [
            device.host_slab(elements, torch.float32, pinned=False)
            for _ in range(3 + num_accumulators)
        ]
        self._staging = device.host_slab(staging_bytes, torch.uint8, pinned=True)
        self._element = 0
        self._byte = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all slabs together."""
        slabs = [*self._float32, self._staging]
        return sum(slab.numel() * slab.element_size() for slab in slabs)

    @property
    def pinned_bytes(self) -> int:
        """Bytes that are pinned on a GPU."""
        return self._staging.numel()

    def take(self, num_columns: int, num_rows: int, dtype: torch.dtype) -> HostRows:
        """Return the next parameter's room, shape (num_columns, num_rows)."""
        count = num_columns * num_rows
        views = [
            slab[self._element : self._element + count].view(num_columns, num_rows)
            for slab in self._float32
        ]
        staging = typed_view(self._staging, self._byte, count, dtype).view(num_columns, num_rows)
        self._element += count
        self._byte += _aligned(count * dtype.itemsize)
        return HostRows(
            master=views[0],
            exp_avg=views[1],
            exp_avg_sq=views[2],
            accumulators=views[3:],
            step=torch.zeros(num_columns, dtype=torch.int64),
            staging=staging,
        )


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def typed_view(buffer: Tensor, offset: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return `count` elements of a byte buffer, from an aligned byte offset on, as `dtype`."""
    return buffer[offset : offset + count * dtype.itemsize].view(dtype)


class UploadBuffer:
    """Where the updates of one boundary step wait until they have been uploaded."""

    def __init__(self) -> None:
        """Start with no memory."""
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.offset = 0
        self.num_open = 0
        """Updates in this buffer that have not landed yet."""
        self.uploads: list[Completion] = []
        """Copies out of this buffer since it was taken; on a GPU they may outlast the landing."""


class UploadPool:
    """Reuses upload buffers: as many as there are boundary steps with updates in flight."""

    def __init__(self, device: AbstractDevice, capacity: int) -> None:
        """Make an empty pool.

        Args:
            device: Whose pinned memory is used.
            capacity: Bytes of the largest boundary step in the long run.
        """
        self._device = device
        self.capacity = capacity
        self._buffers: list[UploadBuffer] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers together."""
        return sum(buffer.memory.numel() for buffer in self._buffers)

    def reserve(self, count: int) -> None:
        """Allocate the first buffers now, so that no step waits for memory to be pinned."""
        for _ in range(count if self.capacity else 0):
            buffer = UploadBuffer()
            buffer.memory = self._device.upload_memory(self.capacity)
            self._buffers.append(buffer)

    def reset(self) -> None:
        """Forget all updates in flight; their buffers are dropped."""
        self._buffers.clear()

    def take(self, sizes: Sequence[tuple[int, torch.dtype]]) -> UploadBuffer:
        """Return a buffer with room for pieces of (elements, dtype), all its updates landed.

        A host task that writes to it must come after `uploads`, the copies of its last use.
        """
        needed = max(self.capacity, upload_bytes(sizes))
        free = next((buffer for buffer in self._buffers if buffer.num_open == 0), None)
        if free is None:
            free = UploadBuffer()
            self._buffers.append(free)
        if not needed <= free.memory.numel() <= 2 * needed:  # left from another interval
            free.memory = self._device.upload_memory(needed)
        free.offset = 0
        return free


def upload_bytes(sizes: Sequence[tuple[int, torch.dtype]]) -> int:
    """Return the bytes of a buffer for pieces of (elements, dtype)."""
    return sum(_aligned(count * dtype.itemsize) for count, dtype in sizes)


def carve(buffer: UploadBuffer, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the buffer's next piece, of this shape."""
    count = math.prod(shape)
    piece = typed_view(buffer.memory, buffer.offset, count, dtype).view(*shape)
    buffer.offset += _aligned(count * dtype.itemsize)
    return piece
