"""A CPU in the role of the device.

A "stream" is the copy lane's thread here, so that a copy is over when its function returns, and
there are no events.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zenflow.device.base import (
    AbstractDevice,
    Arrival,
    Gather,
    HostValues,
    gathered_together,
)
from zenflow.device.kernels.base import HostColumns
from zenflow.device.kernels.torch_kernels import CpuKernels
from zenflow.host import changes
from zenflow.host import memory as host_memory
from zenflow.lanes.completion import Completion


class CpuDevice(AbstractDevice):
    """A CPU in the role of the device; copies are plain memory copies, paced by the lane."""

    is_synchronous = True

    def __init__(self, device: torch.device) -> None:
        """Bind to the CPU."""
        super().__init__(device)
        self.kernels = CpuKernels()

    def enter_thread(self, lane: str | None = None) -> None:
        """Do nothing: there is only one CPU."""

    def mark(self) -> None:
        """Return None: all launched work is done."""
        return

    def pack(self, jobs: list[tuple[Tensor, HostColumns, Tensor]], after: Any) -> None:
        """Gather columns into host rows."""
        for grad_OI, columns, host_DO in jobs:
            self.kernels.pack(grad_OI, columns, host_DO)

    def open_lane(self, lane: str) -> None:
        """Do nothing: a lane is its thread."""

    def transfer(self, lane: str, jobs: Sequence[tuple[Tensor, Tensor]], after: Any) -> None:
        """Copy."""
        for source, target in jobs:
            target.copy_(source)

    def keep(self, tensors: Sequence[Tensor], lane: str) -> None:
        """Do nothing: work is over when it returns."""

    def resize(self, memory: Tensor, num_bytes: int, lane: str, after: Any) -> None:
        """Resize the storage."""
        memory.untyped_storage().resize_(num_bytes)

    def unpack(
        self, arrivals: Sequence[Arrival], after: Any, gather: Gather | None = None
    ) -> None:
        """Scatter host rows into columns."""
        for run in gathered_together(arrivals, gather):
            moved: Sequence[Tensor] = [self._arrived(arrival) for arrival in run]
            if gather is not None:
                moved = gather(moved, [len(arrival.weight) for arrival in run])
            for arrival, values_DO in zip(run, moved, strict=True):
                self.kernels.land(values_DO, arrival.columns, arrival.weight, None)

    def order_after(self, completion: Completion) -> None:
        """Do nothing: the data is there when the completion is."""

    def to_host(self, values: Tensor) -> HostValues:
        """Return the values."""
        return HostValues(values)

    def host_memory(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return memory."""
        return torch.empty(num_elements, dtype=dtype, device="cpu")

    def send(self, host: Tensor) -> Tensor:
        """Return the numbers where they are."""
        return host

    def to_device(self, values: Sequence[float]) -> Tensor:
        """Return the numbers."""
        return torch.tensor(values, dtype=torch.float32, device="cpu")

    def pinned_slab(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return zeroed memory; there is nothing to pin for."""
        return host_memory.zeroed(num_elements, dtype)

    def free_slab(self, slab: Tensor) -> None:
        """Do nothing: the memory goes with the tensor."""

    def timing_mark(self) -> float:
        """Return the seconds of `time.perf_counter`."""
        return time.perf_counter()

    def seconds_of(self, moment: float) -> float:
        """Return the mark, which is seconds already."""
        return moment

    def synchronize(self) -> None:
        """Do nothing: nothing is launched ahead."""

    def close(self) -> None:
        """Do nothing: nothing is pinned."""

    def _arrived(self, arrival: Arrival) -> Tensor:
        """Return the arriving columns with the fresh step of their late gradient applied."""
        if arrival.changed is not None and arrival.marks is not None:
            values_DO = torch.empty_like(arrival.values)
            self.kernels.pack(arrival.weight, arrival.columns, values_DO)
            changes.put(values_DO, arrival.marks, arrival.changed)
            return values_DO
        if arrival.late is None:
            return arrival.values
        values_DO = arrival.values.clone()
        self.kernels.move_on(values_DO, arrival.columns, arrival.late)
        return values_DO
