"""Upload buffer: where updated weights wait, on the host, until they have been uploaded."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from zenflow.columns.byte_memory import ByteMemory
from zenflow.columns.host_rows import aligned
from zenflow.lanes.completion import Completion
from zenflow.lanes.lease import Lease


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
        return [*self._before, *(user for piece in self._pieces for user in piece.users)]

    def restart(self) -> None:
        """Cut the buffer anew; all its updates have landed."""
        self._before, self._pieces, self._offset = self.users, [], 0

    def next_piece(self, shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Lease]:
        """Return the buffer's next piece as a matrix, for a block's upload, and its lease."""
        piece = self.memory.matrix(self._offset, shape, dtype)
        self._offset += aligned(shape[0] * shape[1] * dtype.itemsize)
        lease = Lease(self._before)
        self._pieces.append(lease)
        return piece, lease
