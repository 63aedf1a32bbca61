"""Host memory of the deferred columns: slabs, allocated once, and each block's views.

A split parameter's host side is laid out column by column, (D, O) for D deferred columns: a column
is one contiguous row, moving a column is a row copy, and Adam's step count is per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zenflow.columns.byte_memory import ByteMemory
from zenflow.device.base import AbstractDevice
from zenflow.host import memory as host_memory

ROW_STATE = ("step", "master", "exp_avg", "exp_avg_sq")
"""Names of the tensors that move with a column when it changes owner, on host and device."""

ALIGNMENT = 64
"""Number of bytes at whose multiples a block's memory begins: a cache line."""


@dataclass(slots=True, eq=False)
class HostRows:
    """Host-owned columns as rows: (D, O) and float32 unless said otherwise.

    `exp_avg`, `exp_avg_sq` and `step` are AdamW's state in torch's names.
    """

    master: Tensor
    """True weights of the columns, (D, O), float32."""
    exp_avg: Tensor
    """AdamW's first moments of the columns, (D, O), float32."""
    exp_avg_sq: Tensor
    """AdamW's second moments of the columns, (D, O), float32."""
    step: Tensor
    """Number of Adam steps that each row has taken, (D,), int64."""
    staging: Tensor
    """Gradients of one step, (D, O) in the parameter's dtype; pinned where the device is a GPU."""

    def rows(self, part: slice | Tensor) -> HostRows:
        """Return the views of a slice of the rows, or copies of the rows of some indices."""
        return HostRows(
            master=self.master[part],
            exp_avg=self.exp_avg[part],
            exp_avg_sq=self.exp_avg_sq[part],
            step=self.step[part],
            staging=self.staging[part],
        )


class HostSlabs:
    """Large allocations, one for each field of `HostRows`, handed out parameter by parameter."""

    def __init__(
        self,
        device: AbstractDevice,
        shapes: Sequence[tuple[int, int, torch.dtype]],
    ) -> None:
        """Allocate for (D, O, dtype) of each split parameter, D the most columns it may defer."""
        elements = sum(columns * rows for columns, rows, _ in shapes)
        staging_bytes = sum(aligned(c * r * dtype.itemsize) for c, r, dtype in shapes)
        self._float32 = [host_memory.zeroed(elements, torch.float32) for _ in range(3)]
        self._staging = ByteMemory(device.pinned_slab(staging_bytes, torch.uint8))
        self._element = 0
        self._byte = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all slabs together."""
        return sum(slab.nbytes for slab in self._float32) + self.pinned_bytes

    @property
    def pinned_bytes(self) -> int:
        """Bytes that are pinned on a GPU."""
        return self._staging.num_bytes

    def take(self, num_columns: int, num_rows: int, dtype: torch.dtype) -> HostRows:
        """Return the next parameter's piece of every slab, shape (num_columns, num_rows)."""
        count = num_columns * num_rows
        views = [
            slab[self._element : self._element + count].view(num_columns, num_rows)
            for slab in self._float32
        ]
        staging = self._staging.matrix(self._byte, (num_columns, num_rows), dtype)
        self._element += count
        self._byte += aligned(count * dtype.itemsize)
        return HostRows(
            master=views[0],
            exp_avg=views[1],
            exp_avg_sq=views[2],
            step=torch.zeros(num_columns, dtype=torch.int64, device="cpu"),
            staging=staging,
        )


def aligned(num_bytes: int) -> int:
    """Return the next multiple of `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
