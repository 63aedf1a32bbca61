"""Squared norms of the columns and rows of many matrices, by few launches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import triton
from torch import Tensor

from zenflow.device.kernels import triton_source
from zenflow.device.kernels.triton_launches import (
    EXACT,
    Access,
    Launch,
    Table,
    Tables,
    readable,
)

SQUARES = {"ROWS": 64, "COLUMNS": 128, "num_warps": 4}
"""Tile of elements of `add_squares`."""
PARTS = {"PARTS": 64, "WIDTH": 32, "num_warps": 4}
"""Numbers that `add_parts` adds up at once."""
MOST_PROGRAMS = 1024
"""Number of programs that fill any device; more of them for a matrix leave more parts."""
MOST_ELEMENTS = 1 << 26
"""Number of elements that are measured together, two buckets' or so. Parts of so many matrices
take some megabytes."""

Measured = tuple[Tensor, Tensor, Tensor]
"""Matrix (O, I), output by column (I,), output by row (O,), as `DeviceKernels.energies` has it."""


class _Plan(NamedTuple):
    """Launches by which some matrices are measured, but for the matrices' addresses."""

    squares: list[Launch[tuple[Access, bool]]]
    """First launches: a kind is a way of reading, and whether rows are asked for."""
    num_parts: int
    """Number of the parts that they leave."""
    sums: Table
    """Places of parts, and of the sums that they add up to."""


class Norms:
    """Measures matrices in two launches, whatever their shapes.

    The parts of a matrix, and the order in which they are added up, are those of the matrix alone:
    no bit depends on which matrices are measured together.
    """

    def __init__(self, tables: Tables) -> None:
        """Keep what launches go by in these tables."""
        self._tables = tables

    def measure(self, measured: Sequence[Measured]) -> None:
        """Do as `DeviceKernels.energies`."""
        filled = []
        for each in measured:
            if each[0].numel():
                filled.append((readable(each[0]), *each[1:]))
            else:
                each[1].zero_()
                each[2].zero_()
        for together in _groups(filled):
            self._measure(together)

    def _measure(self, measured: Sequence[Measured]) -> None:
        key = tuple(
            (matrix.shape, matrix.stride(), matrix.dtype, columns.data_ptr(),
             rows.data_ptr() if rows.numel() else None)
            for matrix, columns, rows in measured
        )  # fmt: skip
        plan = self._tables.known(("norms", key), lambda: self._planned(key))
        parts = measured[0][1].new_empty(plan.num_parts)
        addresses = self._tables.addresses(tuple(matrix.data_ptr() for matrix, *_ in measured))
        for launch in plan.squares:
            (access, has_rows), table = launch.kind, launch.table
            triton_source.add_squares[table.grid](
                addresses, table.rows, table.owners, parts, HAS_ROWS=has_rows,
                **access.settings, **table.settings, **SQUARES, **EXACT,
            )  # fmt: skip
        sums = plan.sums
        triton_source.add_parts[sums.grid](
            parts, sums.rows, sums.owners, **sums.settings, **PARTS, **EXACT
        )

    def _planned(self, key: Sequence[tuple[Any, ...]]) -> _Plan:
        num_parts, matrices, sums = 0, [], []
        for shape, strides, dtype, to_columns, to_rows in key:
            num_rows, num_columns = shape
            across = triton.cdiv(num_columns, SQUARES["COLUMNS"])
            down = triton.cdiv(num_rows, SQUARES["ROWS"])
            num_tiles = max(1, across * down // MOST_PROGRAMS)
            strips = triton.cdiv(down, num_tiles)
            of_columns, of_rows = num_parts, num_parts + strips * num_columns
            row = [*shape, *strides, num_tiles, across, of_columns, of_rows]
            kind = Access.of(shape, strides, dtype), to_rows is not None
            matrices.append((kind, row, strips * across))
            sums.append([of_columns, to_columns, num_columns, strips])
            num_parts = of_rows
            if to_rows is not None:
                sums.append([of_rows, to_rows, num_rows, across])
                num_parts += across * num_rows
        widths = [triton.cdiv(length, PARTS["WIDTH"]) for _, _, length, _ in sums]
        return _Plan(self._tables.launches(matrices), num_parts, self._tables.table(sums, widths))


def _groups(measured: Sequence[Measured]) -> Iterator[list[Measured]]:
    """Yield matrices in groups of `MOST_ELEMENTS`, or of one."""
    group: list[Measured] = []
    num_elements = 0
    for each in measured:
        if group and num_elements + each[0].numel() > MOST_ELEMENTS:
            yield group
            group, num_elements = [], 0
        group.append(each)
        num_elements += each[0].numel()
    if group:
        yield group
