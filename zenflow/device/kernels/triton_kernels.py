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
from torch import Tensor

from zenflow.device.kernels import triton_source
from zenflow.device.kernels.base import (
    ColumnStep,
    DeviceKernels,
    FreshMove,
    FreshVectors,
    HostColumns,
    LateGradient,
    SecondMoments,
)
from zenflow.device.kernels.column_table import ColumnRun, runs_of
from zenflow.device.kernels.triton_gathers import Gathers
from zenflow.device.kernels.triton_launches import EXACT, Table, Tables, triton_type
from zenflow.device.kernels.triton_norms import Norms
from zenflow.host_state import GROUP
from zenflow.rule.adamw import Hyper, row_scales

TURNED = {"ROWS": 32, "COLUMNS": 128, "num_warps": 4}
"""Tile of kernels that turn columns into rows, or back."""
ROUNDED = {"ROWS": GROUP, "COLUMNS": 64, "num_warps": 4}
"""Tile of columns that are packed in eight bits: a group of each."""
STEPPED = {"ROWS": 64, "COLUMNS": 32, "num_warps": 4}
"""Tile of elements of `adamw`."""
FACTORS = {"WIDTH": 1024, "num_warps": 4}
"""Columns or rows that `fresh_factors` takes at once."""
_INTERPRETING = threading.Lock()
"""Held while a kernel is interpreted: the interpreter serves one thread at a time."""


class TritonKernels(DeviceKernels):
    """Triton's kernels, in the calling thread's stream.

    A matrix may have no rows, on a rank that no row of it came to. CUDA launches no empty grid.
    """

    name = "triton"
    moves_while_packing = True

    def __init__(self, device: torch.device) -> None:
        """Bind to a GPU; a CPU serves under Triton's interpreter."""
        self._device = device
        self._tables = Tables(device)
        self._norms = Norms(self._tables)
        self._gathers = Gathers(self._tables)

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
        """Read each matrix once; a second small kernel adds up all parts."""
        with self._here():
            self._norms.measure(measured)

    def important(self, asked: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Return them as rows, (K, O), parts of one buffer."""
        with self._here():
            return self._gathers.gather(asked)

    def begin_factors(self, vectors: FreshVectors) -> None:
        """Do nothing: the kernel of `make_factors` reads all terms."""

    def make_factors(
        self, vectors: FreshVectors, matrices: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        """Compute all factors by one launch, from the terms."""
        own, of_rows = vectors.columns, vectors.rows
        first, first_row = own.factors.storage_offset(), of_rows.factors.storage_offset()
        places = tuple(
            (int(columns.storage_offset() - first), columns.numel(),
             int(rows.storage_offset() - first_row), rows.numel())
            for columns, rows in matrices
        )  # fmt: skip
        with self._here():
            table = self._tables.known(("factors", places), lambda: self._by_width(places))
            triton_source.fresh_factors[table.grid](
                *_terms(own), vectors.shares, *_terms(of_rows), table.rows, table.owners,
                **table.settings, **FACTORS, **EXACT,
            )  # fmt: skip

    def _by_width(self, places: Sequence[tuple[int, int, int, int]]) -> Table:
        """Return a table whose programs have `FACTORS` columns or rows each."""
        width = FACTORS["WIDTH"]
        counts = [
            triton.cdiv(num_columns, width) + triton.cdiv(num_rows, width)
            for _, num_columns, _, num_rows in places
        ]
        return self._tables.table(places, counts)

    def divide(self, grad_OI: Tensor, roots: FreshMove) -> Tensor:
        """Read the gradient once, and write as much."""
        divided_OI = torch.empty_like(grad_OI)
        if grad_OI.numel():
            num_rows, num_columns = grad_OI.shape
            with self._here():
                triton_source.divide[_grid(num_columns, num_rows, TURNED)](
                    grad_OI, divided_OI, roots.column_factors, roots.row_factors, roots.rate,
                    num_rows, num_columns, *grad_OI.stride(), *divided_OI.stride(),
                    **TURNED, **EXACT,
                )  # fmt: skip
        return divided_OI

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
                PACKS=packed_DO is not None, ROUNDS=rounds, **tile, **EXACT,
            )  # fmt: skip

    def land(
        self,
        arrived_DO: Tensor,
        columns: HostColumns,
        weight_OI: Tensor,
        late: LateGradient | None,
    ) -> None:
        """Read rows once, and their late gradient, and write columns."""
        self._land(arrived_DO, columns, weight_OI, late)

    def move_on(self, arrived_DO: Tensor, columns: HostColumns, late: LateGradient) -> None:
        """Do all of `land` but the writing of columns, by the same kernel."""
        self._land(arrived_DO, columns, None, late)

    def _land(
        self,
        arrived_DO: Tensor,
        columns: HostColumns,
        weight_OI: Tensor | None,
        late: LateGradient | None,
    ) -> None:
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
                *((0, 0) if weight_OI is None else weight_OI.stride()),
                *((0, 0) if newer is None else newer.stride()),
                IS_LATE=late is not None, IS_PACKED=is_packed, LANDS=weight_OI is not None,
                **TURNED, **EXACT,
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
        with self._here():
            for kind, run in runs_of(stepped, STEPPED).items():
                hyper, table = kind.hyper, self._by_tile(run)
                kept, rest1 = 1.0 - hyper.lr * hyper.weight_decay, 1.0 - hyper.beta1
                triton_source.adamw[table.grid](
                    self._tables.addresses(tuple(run.addresses)), table.rows, table.owners,
                    *scales[hyper], factor,
                    kept, rest1, hyper.beta2, 1.0 - hyper.beta2, hyper.eps,
                    HAS_FACTOR=factor is not None, HAS_SECOND=kind.has_second,
                    DTYPE=triton_type(kind.dtype), IS_WIDE=kind.is_wide, **table.settings,
                    **STEPPED, **EXACT,
                )  # fmt: skip

    def _by_tile(self, run: ColumnRun) -> Table:
        """Return a table whose programs have a tile of `STEPPED` each."""
        rows = tuple(run.rows)
        return self._tables.known(
            ("columns", rows), lambda: self._tables.table(rows, run.programs)
        )


def _ranges(columns: HostColumns) -> tuple[int, int, int, int]:
    return columns.first_row, columns.last_row, columns.first_column, columns.last_column


def _grid(num_columns: int, num_rows: int, tile: dict[str, int]) -> tuple[int, int]:
    # Without `triton.cdiv`, which takes 2.5 us and is called in every launch.
    return -(-num_columns // tile["COLUMNS"]), -(-num_rows // tile["ROWS"])


def _terms(moments: SecondMoments) -> tuple[Tensor, ...]:
    past = moments.mean_squares, moments.decay, moments.floor
    return moments.energies, moments.gain, *past, moments.factors
