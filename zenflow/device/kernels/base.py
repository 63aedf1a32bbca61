"""Interface of the kernels: what one pass over a step's gradients and weights consists of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zenflow.host import e4m3
from zenflow.rule.adamw import Hyper


@dataclass(frozen=True, slots=True, eq=False)
class HostColumns:
    """Columns of a matrix that are neighbouring rows on the host."""

    indices: Tensor
    """Column of each of these rows, (D,), int64."""
    rows: Tensor
    """Host row of each column of the matrix, (I,), int32; -1 for a column that has none."""
    first_row: int
    """First of these host rows."""
    last_row: int
    """Host row after the last one."""
    first_column: int
    """Column from which on these columns lie; others may lie among them."""
    last_column: int
    """Column before which these columns lie."""

    @classmethod
    def of(cls, indices: Tensor, num_columns: int) -> HostColumns:
        """Return columns, (D,) int64, which are all host rows of a matrix of so many columns."""
        count = len(indices)
        rows = torch.full((num_columns,), -1, dtype=torch.int32, device=indices.device)
        rows[indices] = torch.arange(count, dtype=torch.int32, device=indices.device)
        return cls(indices, rows, 0, count, 0, num_columns)

    def __len__(self) -> int:
        """Return the number of columns, D."""
        return self.last_row - self.first_row

    def turned(self, matrix_OI: Tensor) -> tuple[Tensor, Tensor]:
        """Return all columns of a matrix among which these lie, as rows, and the rows of these.

        On a CPU the rows are contiguous: to gather from them takes a fraction of the time. They
        are copied by lines, then turned, for which torch is fast where nothing lies between lines.
        """
        first = self.first_column
        rows = matrix_OI[:, first : self.last_column]
        rows = rows.contiguous().t().contiguous() if matrix_OI.is_cpu else rows.t()
        return rows, self.indices - first if first else self.indices


@dataclass(frozen=True, slots=True, eq=False)
class SecondMoments:
    """Terms of the second moments of columns, or of rows, and what becomes of them.

    Vectors, float32. A second moment is floor + decay mean_square + gain energy.
    """

    mean_squares: Tensor
    """Second moments before this step."""
    decay: Tensor
    """Factor on each of the moments before this step."""
    floor: Tensor
    """Addend by which no second moment is 0."""
    energies: Tensor
    """Squared norms of this step's gradients."""
    gain: Tensor
    """Factor on each of the squared norms."""
    factors: Tensor
    """Factors of the fresh step, the output."""


@dataclass(frozen=True, slots=True, eq=False)
class FreshVectors:
    """Vectors over the columns and the rows of neighbouring matrices."""

    columns: SecondMoments
    """Second moments C of the columns."""
    shares: Tensor
    """Factor on the step of each column, float32; 0 for one that has no fresh step."""
    rows: SecondMoments
    """Second moments R of the rows."""


@dataclass(frozen=True, slots=True, eq=False)
class FreshMove:
    """Factors of one matrix's fresh step: w_ij <- w_ij - rate g_ij column_j row_i."""

    column_factors: Tensor
    """Factor on each column, (I,), float32."""
    row_factors: Tensor
    """Factor on each row, (O, 1), float32."""
    rate: float
    """Factor on all elements."""
    stays: Tensor | None = None
    """Further factor on each column, (I,), float32: 0 for one that must not move; None for none.
    """


@dataclass(frozen=True, slots=True)
class LateGradient:
    """A gradient that is newer than an update, which is applied when the update arrives."""

    rows: Tensor
    """Columns of the gradient as rows: (I, O), or the arriving ones as they are packed."""
    is_packed: bool
    """Whether `rows` are the arriving columns alone, in their order."""
    move: FreshMove
    """Fresh step by this gradient; its rows are those that the arriving columns have."""
    is_rounded: bool = False
    """Whether packed gradients have eight bits (`zenflow.host.e4m3`). Others are rounded to as
    many, so that it makes no difference which are at hand."""

    def arriving(self, columns: HostColumns) -> Tensor:
        """Return the gradient of arriving columns, (D, O), float32 where it is rounded."""
        if self.is_packed:
            return e4m3.decode(self.rows) if self.is_rounded else self.rows
        rows_DO = self.rows.index_select(0, columns.indices)
        return e4m3.rounded(rows_DO) if self.is_rounded else rows_DO


@dataclass(frozen=True, slots=True)
class ColumnState:
    """AdamW's state of some columns, as rows: views that an update writes to."""

    master: Tensor
    """True weights, (K, O), float32."""
    exp_avg: Tensor
    """First moments, (K, O), float32."""
    exp_avg_sq: Tensor
    """Second moments, (K, O), float32; (K, 0) where gradients come divided by their roots."""
    step: Tensor
    """Number of Adam steps that each row has taken, (K,), int64."""


@dataclass(frozen=True, slots=True)
class Member:
    """A matrix some of whose columns an update of `ColumnState` steps."""

    weight: Tensor | None
    """Weight that the stepped columns are written to, (O, I); None for one that is elsewhere."""
    columns: Tensor
    """Indices of the columns, (K,), int64."""
    gradient: Tensor
    """Gradient of these columns, as `DeviceKernels.important` has returned it."""


@dataclass(frozen=True, slots=True)
class ColumnStep:
    """Columns of one length that take an AdamW step, and the matrices that they are of."""

    state: ColumnState
    """State of the members' columns, one member after another."""
    members: Sequence[Member]
    """Matrices of one dtype and one number of rows."""
    hyper: Hyper
    """Settings of the step."""


class DeviceKernels(ABC):
    """Operations on matrices of a device, launched in order on the calling thread's stream.

    Matrices are (O, I): O rows, I columns. A column that leaves for the host, or comes from it, is
    a row there: (D, O).
    """

    name: str
    """Name in settings and saved states."""

    moves_while_packing = False
    """Whether `pack` can take the fresh step of the columns that it packs."""

    @abstractmethod
    def energies(self, measured: Sequence[tuple[Tensor, Tensor, Tensor]]) -> None:
        """Write the squared norms of each column and each row of some matrices, float32.

        A column's squared norm is ZenFlow's proxy for its importance (arXiv 2505.12242).

        Args:
            measured: (matrix (O, I), output by column (I,), output by row (O,)) each; the last is
                empty where nobody asks for rows.
        """

    @abstractmethod
    def important(self, asked: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Return copies of gradients' important columns, as `update` takes them.

        Args:
            asked: (gradient (O, I), indices of its important columns (K,), int64) each.
        """

    @abstractmethod
    def begin_factors(self, vectors: FreshVectors) -> None:
        """Do the part of `make_factors` that needs no energies, for all matrices of a step."""

    @abstractmethod
    def make_factors(
        self, vectors: FreshVectors, matrices: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        """Compute the factors of some matrices' fresh steps, in a step that `begin_factors` began.

        By the formulas of `zenflow.step.fresh.steps` a column's factor is share / sqrt(C), and a
        row's sqrt(mean(C) / R), with the mean over the matrix's columns. No bit depends on which
        matrices are computed together.

        Args:
            vectors: Terms and output.
            matrices: (factors by column (I,), factors by row (O,)) each, views of the output.
                Factors of other matrices are undefined.
        """

    @abstractmethod
    def divide(self, grad_OI: Tensor, roots: FreshMove) -> Tensor:
        """Return rate g_ij column_j row_i: gradients divided by the roots of second moments.

        Computed in float32 and rounded once.

        Args:
            grad_OI: The gradient.
            roots: Factors of the whole matrix, whose `stays` is None.

        Returns:
            New memory, (O, I), of the gradient's dtype.
        """

    @abstractmethod
    def move(self, weight_OI: Tensor, grad_OI: Tensor, move: FreshMove) -> None:
        """Take the fresh step of a whole matrix.

        Args:
            weight_OI: The weight.
            grad_OI: Its gradient.
            move: The factors.
        """

    @abstractmethod
    def pack(
        self,
        grad_OI: Tensor,
        columns: HostColumns,
        packed_DO: Tensor,
        weight_OI: Tensor | None = None,
        move: FreshMove | None = None,
    ) -> None:
        """Copy columns of a matrix to rows, and take their fresh step if one is given.

        Args:
            grad_OI: The matrix, a gradient mostly.
            columns: The columns.
            packed_DO: Output, contiguous. A uint8 output, (D, O + ceil(O / 64)), gets the columns
                as `zenflow.host.e4m3` rounds them.
            weight_OI: Weight of the fresh step, for `moves_while_packing`; nobody else may write
                to the columns among which the packed ones lie.
            move: Factors of the fresh step; None for none.
        """

    def packed(self, grad_OI: Tensor, columns: HostColumns, like: Tensor) -> Tensor:
        """Return columns of a matrix as rows of new memory, in the shape and dtype of `like`."""
        packed_DO = grad_OI.new_empty(like.shape, dtype=like.dtype)
        self.pack(grad_OI, columns, packed_DO)
        return packed_DO

    @abstractmethod
    def land(
        self,
        arrived_DO: Tensor,
        columns: HostColumns,
        weight_OI: Tensor,
        late: LateGradient | None,
    ) -> None:
        """Write rows that have come from the host into a weight's columns, and into no other.

        Args:
            arrived_DO: The rows, on the device; may be overwritten where a gradient is late.
            columns: The columns.
            weight_OI: The weight.
            late: Gradient whose fresh step the columns still need; None where there is none.
        """

    @abstractmethod
    def move_on(self, arrived_DO: Tensor, columns: HostColumns, late: LateGradient) -> None:
        """Apply a late gradient's fresh step to rows that have come, in place, and land nothing.

        `land` would leave equal bits in the weight: ranks that share the host's work move their
        own rows on before they bring them together.

        Args:
            arrived_DO: The rows, on the device.
            columns: The columns.
            late: The gradient.
        """

    @abstractmethod
    def update(self, steps: Sequence[ColumnStep], factor: Tensor | None) -> None:
        """Apply one AdamW step to columns, and write them into their weights where these are here.

        Args:
            steps: The columns; none is there twice.
            factor: Factor on the gradients, shape (), float32; None for 1.
        """
