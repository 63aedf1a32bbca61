"""Upload buffers, in which updated weights wait on the host, and the pool that reuses them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zenflow.columns.byte_memory import ByteMemory
from zenflow.columns.host_rows import aligned
from zenflow.columns.layout import Block
from zenflow.config import ZenFlowConfig
from zenflow.device.base import AbstractDevice
from zenflow.host_state import MARKED_BYTES, mark_bytes
from zenflow.lanes.completion import Completion, unique, wait_all
from zenflow.lanes.lease import Lease
from zenflow.rule.calendar import WindowCalendar


@dataclass(slots=True, eq=False)
class UploadBuffer:
    """Memory for the updates of one boundary step, cut into a piece for each update."""

    memory: ByteMemory
    """Bytes of the buffer."""
    num_open: int = 0
    """Number of updates in this buffer that have not landed yet."""
    _pieces: list[Lease] = field(default_factory=list)
    """Leases of the pieces."""
    _before: list[Completion] = field(default_factory=list)
    """Users of the pieces into which the buffer was cut before."""
    _offset: int = 0
    """First byte of the next piece."""

    @property
    def users(self) -> list[Completion]:
        """Work on the buffer that may not have ended; on a GPU uploads may outlast the landing."""
        former = [user for user in self._before if not user.has_succeeded]
        return [*former, *(user for piece in self._pieces for user in piece.users)]

    def restart(self) -> None:
        """Cut the buffer anew; all its updates have landed."""
        self._before, self._pieces, self._offset = self.users, [], 0

    def next_piece(self, shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Lease]:
        """Return the buffer's next piece as a matrix, for a block's upload, and its lease."""
        lease = Lease(self._before)
        self._pieces.append(lease)
        return self.behind(shape, dtype), lease

    def behind(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Return a matrix behind the last piece, whose lease it shares."""
        matrix = self.memory.matrix(self._offset, shape, dtype)
        self._offset += aligned(shape[0] * shape[1] * dtype.itemsize)
        return matrix


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
        return max(map(self._upload_bytes, by_phase.values()), default=0)

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
        needed = max(self.capacity, self._upload_bytes(blocks))
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

    def _upload_bytes(self, blocks: Iterable[Block]) -> int:
        """Return the bytes of a buffer for the blocks' uploads, with marks where these may be."""
        total = 0
        for block in blocks:
            itemsize = block.split.param.itemsize
            total += aligned(block.host_elements * itemsize)
            if self._config.uploads_changes and itemsize == MARKED_BYTES:
                total += aligned(block.shape.num_deferred * mark_bytes(block.split.num_host_rows))
        return total
