"""The kernels of `zenflow.device.kernels.triton_source`, launched: for CUDA devices.

One pass over gradients and weights moves about 15 bytes for each parameter of two bytes, where
torch's operations move 38.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zenflow.device.kernels import triton_source
from zenflow.device.kernels.base import (
    ColumnStep,
    DeviceKernels,
    FreshMove,
    HostColumns,
    LateGradient,
)
from zenflow.device.kernels.column_table import DeviceNumbers, runs_of
from zenflow.host_state import GROUP
from zenflow.rule.adamw import Hyper, row_scales

SQUARES = {"ROWS": 64, "COLUMNS": 128, "num_warps": 4}
"""Tile of elements of `add_squares`."""
PARTS = {"PARTS": 64, "WIDTH": 32, "num_warps": 4}
"""Numbers that `add_parts` adds up at once."""
GATHERED = {"ROWS": 32, "COLUMNS": 64, "num_warps": 4}
"""Tile of elements of `gather`."""
TURNED = {"ROWS": 32, "COLUMNS": 128, "num_warps": 4}
"""Tile of kernels that turn columns into rows, or back."""
ROUNDED = {"ROWS": GROUP, "COLUMNS": 64, "num_warps": 4}
"""Tile of columns that are packed in eight bits: a group of each."""
STEPPED = {"ROWS": 64, "COLUMNS": 32, "num_warps": 4}
"""Tile of elements of `adamw`."""
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
"""Triton's names of the weights' types."""
_MOST_PROGRAMS = 1024
"""Number of programs of `add_squares` that fill any device; more of them leave more parts."""
_ALIGNMENT = 16
"""Alignment in bytes that Triton asks of a pointer for wide accesses. By these it chooses the
order in which a tile is added up, and a gradient in a buffer of others must give the bits of one
by itself."""
_INTERPRETING = threading.Lock()
"""Held while a kernel is interpreted: the interpreter serves one thread at a time."""
_EXACT = {"enable_fp_fusion": False}
"""No fused multiply-add: a result is what its formula says, on every architecture."""


class TritonKernels(DeviceKernels):
    """Triton's kernels, in the calling thread's stream.

    A matrix may have no rows, on a rank that no row of it came to. CUDA launches no empty grid.
    """

    name = "triton"
    moves_while_packing = True

    def __init__(self, device: torch.device) -> None:
        """Bind to a GPU; a CPU serves under Triton's interpreter."""
        self._device = device
        self._numbers = DeviceNumbers(device)

    @staticmethod
    def is_interpreted() -> bool:
        """Whether Triton interprets the kernels, on any tensors, and compiles nothing."""
        return not isinstance(triton_source.land, triton.JITFunction)

    def _here(self) -> AbstractContextManager[Any]:
        """Return a context in which Triton launches on this device, as torch always does."""
        if self._device.type == "cpu":
            return _INTERPRETING
        is_here = torch.cuda.current_device() == self._device.index
        return nullcontext() if is_here else torch.cuda.device(self._device)

    def energies(self, measured: Sequence[tuple[Tensor, Tensor, Tensor]]) -> None:
        """Read each matrix once; a second small kernel adds up its parts."""
        with self._here():
            for matrix_OI, columns, rows in measured:
                _energies(matrix_OI, columns, rows)

    def important(self, grad_OI: Tensor, columns_K: Tensor) -> Tensor:
        """Return them as rows, (K, O)."""
        count, num_rows = len(columns_K), len(grad_OI)
        rows_KO = grad_OI.new_empty((count, num_rows))
        if rows_KO.numel():
            with self._here():
                triton_source.gather[_grid(count, num_rows, GATHERED)](
                    grad_OI, columns_K, rows_KO, count, num_rows, *grad_OI.stride(), **GATHERED
                )
        return rows_KO

    def move(self, weight_OI: Tensor, grad_OI: Tensor, move: FreshMove) -> None:
        """Read gradient and weight once, and write the weight."""
        if weight_OI.numel():
            whole = (0, 0, 0, weight_OI.shape[1])
            self._move_and_pack(grad_OI, None, whole, None, weight_OI, move)

    def pack(
        self,
        grad_OI: Tensor,
        columns: HostColumns,
        packed_DO: Tensor,
        weight_OI: Tensor | None = None,
        move: FreshMove | None = None,
    ) -> None:
        """Read the gradient once, for both."""
        if packed_DO.numel():
            part = _ranges(columns)
            self._move_and_pack(grad_OI, columns.rows, part, packed_DO, weight_OI, move)

    def _move_and_pack(
        self,
        grad_OI: Tensor,
        host_rows: Tensor | None,
        part: tuple[int, int, int, int],
        packed_DO: Tensor | None,
        weight_OI: Tensor | None,
        move: FreshMove | None,
    ) -> None:
        first, last, num_rows = *part[2:], len(grad_OI)
        rounds = packed_DO is not None and packed_DO.dtype == torch.uint8
        tile = ROUNDED if rounds else TURNED
        factors: tuple[Any, ...] = (None, None, None, 0.0)
        if move is not None:
            factors = (move.column_factors, move.stays, move.row_factors, move.rate)
        with self._here():
            triton_source.move_and_pack[_grid(last - first, num_rows, tile)](
                grad_OI, weight_OI, packed_DO, host_rows, *factors, *part, num_rows,
                *grad_OI.stride(), *((0, 0) if weight_OI is None else weight_OI.stride()),
                MOVES=move is not None, STAYS=move is not None and move.stays is not None,
                PACKS=packed_DO is not None, ROUNDS=rounds, **tile, **_EXACT,
            )  # fmt: skip

    def land(
        self,
        arrived_DO: Tensor,
        columns: HostColumns,
        weight_OI: Tensor,
        late: LateGradient | None,
    ) -> None:
        """Read rows once, and their late gradient, and write columns."""
        if not arrived_DO.numel():
            return
        part, num_rows = _ranges(columns), arrived_DO.shape[1]
        newer: Tensor | None = None
        is_packed = True
        factors: tuple[Any, ...] = (None, None, 0.0)
        if late is not None:
            newer, is_packed = late.rows, late.is_packed
            if late.is_rounded:
                newer, is_packed = late.arriving(columns), True
            factors = (late.move.column_factors, late.move.row_factors, late.move.rate)
        with self._here():
            triton_source.land[_grid(part[3] - part[2], num_rows, TURNED)](
                arrived_DO, weight_OI, newer, columns.rows, *factors, *part, num_rows,
                *weight_OI.stride(), *((0, 0) if newer is None else newer.stride()),
                IS_LATE=late is not None, IS_PACKED=is_packed,
                **TURNED, **_EXACT,
            )  # fmt: skip

    def update(self, steps: Sequence[ColumnStep], factor: Tensor | None) -> None:
        """Step all columns of one kind by one kernel, which finds them by their addresses."""
        if not steps:
            return
        torch._foreach_add_([step.state.step for step in steps], 1)
        stepped = [step for step in steps if step.state.master.numel()]
        counts: dict[Hyper, list[Tensor]] = {}
        for step in stepped:
            counts.setdefault(step.hyper, []).append(step.state.step)
        scales = {hyper: row_scales(torch.cat(own), hyper) for hyper, own in counts.items()}
        runs = runs_of(stepped, STEPPED)
        tables = self._numbers.put([run.numbers for run in runs.values()])
        with self._here():
            for (kind, run), table in zip(runs.items(), tables, strict=True):
                hyper = kind.hyper
                kept, rest1 = 1.0 - hyper.lr * hyper.weight_decay, 1.0 - hyper.beta1
                triton_source.adamw[(run.num_tiles,)](
                    table, *scales[hyper], factor,
                    kept, rest1, hyper.beta2, 1.0 - hyper.beta2, hyper.eps,
                    HAS_FACTOR=factor is not None, IS_WIDE=kind.is_wide,
                    DTYPE=TYPES[kind.dtype], MATRICES=run.num_matrices, **STEPPED, **_EXACT,
                )  # fmt: skip


def _ranges(columns: HostColumns) -> tuple[int, int, int, int]:
    return columns.first_row, columns.last_row, columns.first_column, columns.last_column


def _grid(num_columns: int, num_rows: int, tile: dict[str, int]) -> tuple[int, int]:
    return triton.cdiv(num_columns, tile["COLUMNS"]), triton.cdiv(num_rows, tile["ROWS"])


def _energies(matrix_OI: Tensor, columns: Tensor, rows: Tensor) -> None:
    if not matrix_OI.numel():
        columns.zero_()
        rows.zero_()
        return
    if matrix_OI.data_ptr() % _ALIGNMENT:
        matrix_OI = matrix_OI.clone()
    num_rows, num_columns = matrix_OI.shape
    across, down = _grid(num_columns, num_rows, SQUARES)
    num_tiles = max(1, across * down // _MOST_PROGRAMS)
    strips = triton.cdiv(down, num_tiles)
    has_rows = rows.numel() > 0
    of_columns = columns.new_empty((strips, num_columns))
    of_rows = columns.new_empty((across, num_rows)) if has_rows else rows
    triton_source.add_squares[strips, across](
        matrix_OI, of_columns, of_rows, num_rows, num_columns, *matrix_OI.stride(), num_tiles,
        HAS_ROWS=has_rows, **SQUARES, **_EXACT,
    )  # fmt: skip
    width = PARTS["WIDTH"]
    first = triton.cdiv(num_columns, width)
    last = triton.cdiv(num_rows, width) if has_rows else 0
    triton_source.add_parts[(first + last,)](
        of_columns, of_rows, columns, rows, num_columns, num_rows, strips, across, first,
        **PARTS, **_EXACT,
    )  # fmt: skip
