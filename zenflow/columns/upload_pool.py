"""Pool of upload buffers, which are reused once their updates have landed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from zenflow.columns.byte_memory import ByteMemory
from zenflow.columns.host_rows import aligned
from zenflow.columns.layout import Block
from zenflow.columns.upload_buffer import UploadBuffer
from zenflow.config import ZenFlowConfig
from zenflow.device.base import AbstractDevice
from zenflow.lanes.completion import unique, wait_all
from zenflow.rule.calendar import WindowCalendar


class UploadPool:
    """Upload buffers, used again and again: one for each boundary step with updates in flight."""

    def __init__(
        self,
        device: AbstractDevice,
        config: ZenFlowConfig,
        blocks: Sequence[Block],
        calendar: WindowCalendar,
        wait_timeout: float,
    ) -> None:
        """Allocate all buffers that a long run needs now, so that no step waits for pinned memory.

        Args:
            device: Owner of the pinned memory.
            config: The update rule's settings.
            blocks: All blocks, in backward order.
            calendar: When their windows end.
            wait_timeout: Seconds after which a wait is an error.
        """
        self._device = device
        self._config = config
        self._blocks = blocks
        self._calendar = calendar
        self._wait_timeout = wait_timeout
        self._capacity = 0
        self._counted_version = -1
        self._buffers = [
            self._buffer(self.capacity) for _ in range(self.num_buffers if self.capacity else 0)
        ]

    def _buffer(self, num_bytes: int) -> UploadBuffer:
        return UploadBuffer(ByteMemory(self._device.pinned_slab(num_bytes, torch.uint8)))

    @property
    def num_buffers(self) -> int:
        """Number of buffers that a long run uses at once: one for each step in flight."""
        lag = self._calendar.lag(self._config.full_warm_up_rounds + 1)
        return lag if self._config.rolling else 1

    @property
    def capacity(self) -> int:
        """Bytes of the largest step's uploads, by the windows laid out now; 0 without overlap."""
        if self._counted_version != self._calendar.version:
            self._counted_version = self._calendar.version
            self._capacity = self._count_capacity()
        return self._capacity

    def _count_capacity(self) -> int:
        if not self._config.overlap_step:
            return 0
        by_phase: dict[int, list[Block]] = {}
        for block, phase in zip(self._blocks, self._calendar.phases(), strict=True):
            by_phase.setdefault(phase, []).append(block)
        return max(map(_upload_bytes, by_phase.values()), default=0)

    def reset(self) -> None:
        """Forget all updates in flight, and give their buffers back."""
        for buffer in self._buffers:
            self._free(buffer)
        self._buffers.clear()

    def _free(self, buffer: UploadBuffer) -> None:
        """Free a buffer's memory after its last reader."""
        wait_all(unique(buffer.users), self._wait_timeout)
        self._device.free_slab(buffer.memory.data)

    def take(self, blocks: Sequence[Block]) -> UploadBuffer:
        """Return a buffer with room for the blocks' uploads, all its updates landed."""
        needed = max(self.capacity, _upload_bytes(blocks))
        free = next((buffer for buffer in self._buffers if buffer.num_open == 0), None)
        if free is not None and not needed <= free.memory.num_bytes <= 2 * needed:
            self._free(free)  # left from another interval
            self._buffers.remove(free)
            free = None
        if free is None:
            free = self._buffer(needed)
            self._buffers.append(free)
        free.restart()
        return free


def _upload_bytes(blocks: Iterable[Block]) -> int:
    """Return the bytes of a buffer for the blocks' uploads."""
    return sum(aligned(block.host_elements * block.split.param.dtype.itemsize) for block in blocks)
