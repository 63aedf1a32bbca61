"""Extents: the host's rows of a block, cut into pieces that are read and written as one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from zenflow.host.compact import CompactState
from zenflow.host.float_state import FloatState
from zenflow.rule.sizes import EXTENT_ELEMENTS, extent_rows, tensor_ends, whole_sectors

RowState = FloatState | CompactState


@dataclass(frozen=True, slots=True)
class Extent:
    """State of some host rows of one parameter, as it lies in a file: weights first.

    Each tensor of the state begins at a cache line, and the extent ends with a whole sector.
    """

    index: int
    """Number of the extent in the file."""
    first: int
    """First of the parameter's host rows."""
    last: int
    """Host row after the last one."""
    num_elements: int
    """Elements of a row, O."""
    kind: type[RowState]
    """Format of the state."""
    offset: int
    """First byte of the extent's first place in the file; the second place follows."""

    @property
    def num_bytes(self) -> int:
        """Bytes of a place."""
        return whole_sectors(self._ends()[-1])

    @property
    def weight_bytes(self) -> int:
        """Bytes from the extent's begin that have the weights, in whole sectors."""
        return whole_sectors(self._ends()[self.kind.NUM_WEIGHTS - 1])

    def place(self, number: int) -> int:
        """Return the first byte of place 0 or 1."""
        return self.offset + number * self.num_bytes

    def state(self, memory: Tensor) -> RowState:
        """Return the views of an extent's bytes in memory, uint8."""
        count = self.last - self.first
        views, begin = [], 0
        for dtype, width, end in zip(
            self.kind.DTYPES, self.kind.widths(self.num_elements), self._ends(), strict=True
        ):
            size = count * width * dtype.itemsize
            views.append(memory[begin : begin + size].view(dtype).view(count, width))
            begin = end
        return self.kind(*views)

    def _ends(self) -> list[int]:
        """Return the byte behind each tensor, at which the next one begins."""
        count, widths = self.last - self.first, self.kind.widths(self.num_elements)
        sizes = zip(widths, self.kind.DTYPES, strict=True)
        return tensor_ends(count * width * dtype.itemsize for width, dtype in sizes)


def cut(blocks: Iterable[tuple[int, int, int]], kind: type[RowState]) -> Iterator[list[Extent]]:
    """Yield each block's extents, one after another in the file.

    Args:
        blocks: First host row, the row after the last, and elements of a row, of each block.
        kind: Format of the state.
    """
    index = offset = 0
    for first, last, num_elements in blocks:
        extents = []
        for row, end in extent_rows(first, last, num_elements, EXTENT_ELEMENTS):
            extents.append(Extent(index, row, end, num_elements, kind, offset))
            index, offset = index + 1, offset + 2 * extents[-1].num_bytes
        yield extents
