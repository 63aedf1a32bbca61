"""Upload buffer: where updated weights wait, on the host, until they have been uploaded."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from zenflow.columns.byte_memory import ByteMemory
from zenflow.columns.host_rows import aligned
from zenflow.lanes.completion import Completion


@dataclass(slots=True, eq=False)
class UploadBuffer:
    """Memory for the updates of one boundary step."""

    memory: ByteMemory
    """Bytes of the buffer."""
    num_open: int = 0
    """Number of updates in this buffer that have not landed yet."""
    uploads: list[Completion] = field(default_factory=list)
    """Copies out of this buffer since it was taken; on a GPU they may outlast the landing."""
    offset: int = 0
    """First byte of the next view."""

    def next_view(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Return the buffer's next piece as a matrix: a block's upload."""
        view = self.memory.matrix(self.offset, shape, dtype)
        self.offset += aligned(shape[0] * shape[1] * dtype.itemsize)
        return view
