"""The kernels as torch's own operations: on any device, in some passes more than needed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zenflow.device.kernels.base import (
    ColumnStep,
    DeviceKernels,
    FreshMove,
    FreshVectors,
    HostColumns,
    LateGradient,
)
from zenflow.host import e4m3
from zenflow.rule.adamw import update_rows
from zenflow.rule.sizes import FRESH_ELEMENTS


class TorchKernels(DeviceKernels):
    """torch's operations, in the forms that suit a GPU."""

    name = "torch"

    def energies(self, measured: Sequence[tuple[Tensor, Tensor, Tensor]]) -> None:
        """Take norms, which need no temporary of the gradients' size, and square all together."""
        norms = []
        for grad_OI, columns, rows in measured:
            torch.linalg.vector_norm(grad_OI, dim=0, dtype=torch.float32, out=columns)
            norms.append(columns)
            if rows.numel():
                torch.linalg.vector_norm(grad_OI, dim=1, dtype=torch.float32, out=rows)
                norms.append(rows)
        if norms:
            torch._foreach_mul_(norms, norms)

    def important(self, asked: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Return them as columns, (O, K)."""
        return [grad_OI.index_select(1, columns_K) for grad_OI, columns_K in asked]

    def begin_factors(self, vectors: FreshVectors) -> None:
        """Add up what is known of second moments, in two operations for all matrices."""
        for own in (vectors.columns, vectors.rows):
            torch.addcmul(own.floor, own.mean_squares, own.decay, out=own.factors)

    def make_factors(
        self, vectors: FreshVectors, matrices: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        """Turn second moments into factors in place, elementwise but for each matrix's mean."""
        columns, rows = vectors.columns, vectors.rows
        rows.factors.addcmul_(rows.energies, rows.gain)
        rows.factors.rsqrt_()
        columns.factors.addcmul_(columns.energies, columns.gain)
        of_rows = [of_rows for _, of_rows in matrices]
        roots = [of_columns.mean() for of_columns, _ in matrices]
        columns.factors.rsqrt_().mul_(vectors.shares)
        if len(roots) == 1:
            of_rows[0].mul_(roots[0].sqrt_())
        else:  # one call for all, which come one after another on any device
            torch._foreach_sqrt_(roots)
            torch._foreach_mul_(of_rows, roots)

    def divide(self, grad_OI: Tensor, roots: FreshMove) -> Tensor:
        """Take a float32 temporary of at most `FRESH_ELEMENTS`."""
        divided_OI = torch.empty_like(grad_OI)
        height = max(1, FRESH_ELEMENTS // max(1, grad_OI.shape[1]))
        whole = (divided_OI, grad_OI, roots.row_factors)
        parts = zip(*(tensor.split(height) for tensor in whole), strict=True)
        for divided, grad, factors in parts:
            divided.copy_((grad * roots.column_factors).mul_(factors).mul_(roots.rate))
        return divided_OI

    def move(self, weight_OI: Tensor, grad_OI: Tensor, move: FreshMove) -> None:
        """Move all columns, with a float32 temporary of at most `FRESH_ELEMENTS`."""
        factors_I = move.column_factors if move.stays is None else move.column_factors * move.stays
        if weight_OI.numel() <= FRESH_ELEMENTS:
            weight_OI.addcmul_(grad_OI * factors_I, move.row_factors, value=-move.rate)
            return
        height = max(1, FRESH_ELEMENTS // weight_OI.shape[1])
        whole = (weight_OI, grad_OI, move.row_factors)
        parts = zip(*(tensor.split(height) for tensor in whole), strict=True)
        for weight, grad, factors in parts:
            weight.addcmul_(grad * factors_I, factors, value=-move.rate)

    def pack(
        self,
        grad_OI: Tensor,
        columns: HostColumns,
        packed_DO: Tensor,
        weight_OI: Tensor | None = None,
        move: FreshMove | None = None,
    ) -> None:
        """Gather rows of the transposed gradient."""
        assert move is None, "these kernels move whole matrices"
        _pack(grad_OI.t(), columns.indices, packed_DO)

    def packed(self, grad_OI: Tensor, columns: HostColumns, like: Tensor) -> Tensor:
        """Gather them by one operation, where nothing is encoded."""
        if like.dtype == torch.uint8:
            return super().packed(grad_OI, columns, like)
        return torch.index_select(grad_OI.t(), 0, columns.indices)

    def land(
        self,
        arrived_DO: Tensor,
        columns: HostColumns,
        weight_OI: Tensor,
        late: LateGradient | None,
    ) -> None:
        """Scatter rows into the transposed weight."""
        if late is not None:
            self.move_on(arrived_DO, columns, late)
        weight_OI.t().index_copy_(0, columns.indices, arrived_DO)

    def move_on(self, arrived_DO: Tensor, columns: HostColumns, late: LateGradient) -> None:
        """Take one temporary of the rows' size."""
        move = late.move
        factors_D1 = move.column_factors.index_select(0, columns.indices).unsqueeze(1)
        rows_DO = late.arriving(columns)
        arrived_DO.addcmul_(rows_DO * factors_D1, move.row_factors.t(), value=-move.rate)

    def update(self, steps: Sequence[ColumnStep], factor: Tensor | None) -> None:
        """Go by columns of one length: they are stepped together."""
        for step in steps:
            _update(step, factor)


def _update(step: ColumnStep, factor: Tensor | None) -> None:
    """Join the members' gradients, step all rows together, and scatter them."""
    state, members = step.state, step.members
    grad_OK = torch.cat([member.gradient for member in members], dim=1)
    # Always a copy, and contiguous: one pass turns columns into rows of another dtype.
    grad_KO = grad_OK.new_empty(grad_OK.shape[::-1], dtype=torch.float32).copy_(grad_OK.t())
    if factor is not None:
        grad_KO.mul_(factor)
    update_rows(state.master, state.exp_avg, state.exp_avg_sq, state.step, grad_KO, step.hyper)
    dtypes = {member.weight.dtype for member in members if member.weight is not None}
    if not dtypes:
        return
    fresh_OK = state.master.t().to(dtypes.pop())
    parts = fresh_OK.split([member.columns.numel() for member in members], dim=1)
    for member, part_OK in zip(members, parts, strict=True):
        if member.weight is not None:
            member.weight.index_copy_(1, member.columns, part_OK)


def _pack(grad_IO: Tensor, indices: Tensor, packed: Tensor) -> None:
    if packed.dtype == torch.uint8:
        e4m3.encode(grad_IO.index_select(0, indices), packed)
    else:
        torch.index_select(grad_IO, 0, indices, out=packed)


class CpuKernels(TorchKernels):
    """torch's operations, in the forms that suit a CPU."""

    def energies(self, measured: Sequence[tuple[Tensor, Tensor, Tensor]]) -> None:
        """Square and sum: on a CPU many times faster than a norm over rows."""
        for grad_OI, columns, rows in measured:
            is_float = grad_OI.dtype == torch.float32
            squares = grad_OI.square() if is_float else grad_OI.float().square_()
            torch.sum(squares, 0, out=columns)
            if rows.numel():
                torch.sum(squares, 1, out=rows)

    def pack(
        self,
        grad_OI: Tensor,
        columns: HostColumns,
        packed_DO: Tensor,
        weight_OI: Tensor | None = None,
        move: FreshMove | None = None,
    ) -> None:
        """Turn the columns and gather rows: less time than for a strided gather."""
        assert move is None, "these kernels move whole matrices"
        _pack(*columns.turned(grad_OI), packed_DO)

    def land(
        self,
        arrived_DO: Tensor,
        columns: HostColumns,
        weight_OI: Tensor,
        late: LateGradient | None,
    ) -> None:
        """Scatter columns."""
        if late is not None:
            self.move_on(arrived_DO, columns, late)
        weight_OI.index_copy_(1, columns.indices, arrived_DO.t().contiguous())
