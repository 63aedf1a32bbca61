"""Important columns of many gradients, gathered as rows by few launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from zenflow.device.kernels import triton_source
from zenflow.device.kernels.triton_launches import ALIGNMENT, Access, Launch, Tables

GATHERED = {"ROWS": 32, "COLUMNS": 64, "num_warps": 4}
"""Tile of elements of `gather`."""


class _Plan(NamedTuple):
    """Launches by which columns of some matrices are gathered, but for the matrices' addresses."""

    launches: list[Launch[Access]]
    """Launches, by the way in which matrices are read."""
    is_tall: bool
    """Whether all matrices have numbers of rows that are divisible by `ALIGNMENT`."""
    places: list[int]
    """Place of each matrix's output in the buffer of its dtype."""
    lengths: dict[torch.dtype, int]
    """Number of elements of each dtype's buffer."""


class Gathers:
    """Gathers columns of matrices of one dtype by one launch, into one buffer."""

    def __init__(self, tables: Tables) -> None:
        """Keep what launches go by in these tables."""
        self._tables = tables

    def gather(self, asked: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Do as `DeviceKernels.important`."""
        key = tuple(
            (grad.shape, grad.stride(), grad.dtype, columns.data_ptr(), len(columns))
            for grad, columns in asked
        )
        plan = self._tables.known(("gathers", key), lambda: self._planned(key))
        buffers = {
            dtype: torch.empty(length, dtype=dtype, device=self._tables.device)
            for dtype, length in plan.lengths.items()
        }
        addresses = self._tables.addresses(tuple(grad.data_ptr() for grad, _ in asked))
        for launch in plan.launches:
            access, table = launch.kind, launch.table
            triton_source.gather[table.grid](
                addresses, table.rows, table.owners, buffers[access.dtype],
                IS_TALL=plan.is_tall, **access.settings, **table.settings, **GATHERED,
            )  # fmt: skip
        return [
            buffers[dtype].as_strided((count, shape[0]), (shape[0], 1), place)
            for (shape, _, dtype, _, count), place in zip(key, plan.places, strict=True)
        ]

    def _planned(self, key: Sequence[tuple[Any, ...]]) -> _Plan:
        lengths: dict[torch.dtype, int] = {}
        matrices, places = [], []
        for shape, strides, dtype, columns, count in key:
            num_rows, place = shape[0], lengths.get(dtype, 0)
            across = triton.cdiv(count, GATHERED["COLUMNS"])
            down = triton.cdiv(num_rows, GATHERED["ROWS"])
            # Columns lie apart: reading them is never wide, and no address needs to be aligned.
            access = Access.of(shape, strides, dtype)._replace(is_wide=False)
            matrices.append((access, [*shape, *strides, columns, count, place], across * down))
            places.append(place)
            # Each output begins where a wide access may.
            lengths[dtype] = place + triton.cdiv(count * num_rows, ALIGNMENT) * ALIGNMENT
        is_tall = all(shape[0] % ALIGNMENT == 0 for shape, *_ in key)
        return _Plan(self._tables.launches(matrices), is_tall, places, lengths)
