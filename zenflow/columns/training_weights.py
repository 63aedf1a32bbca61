"""Memory for the deferred weights that training sees, while the device shows the true ones.

In a drained engine no gradient waits, and the memory of gradients has room for weights. Gradients
of one byte may leave too little room for weights of two: the rest has memory of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from zenflow.columns.byte_memory import ByteMemory
from zenflow.columns.host_rows import aligned
from zenflow.columns.layout import SplitParam
from zenflow.device.kernels.base import HostColumns
from zenflow.host import memory as host_memory
from zenflow.rule.sizes import packed_into


class TrainingWeights:
    """Each split parameter's place in the memory of gradients, or beside it.

    A place has room for all rows that a parameter may have on the host, so that it never moves.
    """

    def __init__(self, splits: Sequence[SplitParam], memories: Sequence[ByteMemory]) -> None:
        """Find places in memories that are free whenever the engine is drained."""
        sizes = [aligned(s.slab_rows.shape.numel() * s.param.itemsize) for s in splits]
        places, self.own_bytes = packed_into(sizes, [memory.num_bytes for memory in memories])
        """Bytes of memory that nothing else uses."""
        all_memories = [*memories, ByteMemory(host_memory.zeroed(self.own_bytes, torch.uint8))]
        self._places = {
            split: (all_memories[index], first)
            for split, (index, first) in zip(splits, places, strict=True)
        }

    def of(self, split: SplitParam) -> Tensor:
        """Return a parameter's memory, (D, O) in its dtype."""
        memory, first = self._places[split]
        num_columns, num_rows = split.host.shape
        return memory.matrix(first, (num_columns, num_rows), split.param.dtype)

    def pieces_of(self, split: SplitParam) -> Iterator[tuple[HostColumns, Tensor]]:
        """Yield a parameter's deferred columns and their memory, by `SplitParam.host_cuts`."""
        values = self.of(split)
        for part in split.host_cuts():
            yield split.host_columns(part.start, part.stop), values[part]

    def of_blocks(self, split: SplitParam) -> Sequence[Tensor]:
        """Return the memory of each of a parameter's blocks, (D, O) in its dtype."""
        counts = [block.shape.num_deferred for block in split.blocks]
        parts: Sequence[Tensor] = self.of(split).split(counts)
        return parts
