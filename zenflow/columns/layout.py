"""Layout: the records that say which column of which parameter lives where."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zenflow.columns.device_rows import Bank, NamedParam, Resident
from zenflow.columns.host_rows import HostRows, HostSlabs
from zenflow.columns.host_shares import HostPart, HostShares
from zenflow.columns.shards import Shards
from zenflow.device.base import Gather
from zenflow.device.kernels.base import HostColumns
from zenflow.rule.blocks import BlockShape
from zenflow.rule.sizes import pieces
from zenflow.streaming.page import Page


@dataclass(slots=True, eq=False)
class ColumnVectors:
    """Vectors over the columns of all split parameters, on the device."""

    energies: Tensor
    """Squared L2 norm of each column of this step's gradient, float32; 0 without a gradient."""
    scores: Tensor
    """Moving average of the energies, float32."""
    is_important: Tensor
    """Whether the device owns the column, bool."""
    mean_squares: Tensor
    """AdamW's second moment, averaged over each column's elements, float32; of clipped gradients,
    without bias correction."""
    fresh_factors: Tensor
    """Factor on each column of this step's gradient in the fresh step, float32."""
    host_rows: Tensor
    """Host row of each column in its parameter, int32; -1 where the device owns the column."""

    def part(self, first: int, last: int) -> ColumnVectors:
        """Return views of columns first..last-1."""
        part = slice(first, last)
        return ColumnVectors(
            *(self.energies[part], self.scores[part], self.is_important[part]),
            *(self.mean_squares[part], self.fresh_factors[part], self.host_rows[part]),
        )


@dataclass(slots=True, eq=False)
class RowVectors:
    """Vectors over the rows of all split parameters, on the device, for fresh steps."""

    energies: Tensor
    """Squared L2 norm of each row of this step's gradient, float32; 0 without a gradient."""
    mean_squares: Tensor
    """AdamW's second moment, averaged over each row's elements, float32; of clipped gradients,
    without bias correction."""
    fresh_factors: Tensor
    """Factor on each row of this step's gradient in the fresh step, float32."""

    def part(self, first: int, last: int) -> RowVectors:
        """Return views of rows first..last-1."""
        part = slice(first, last)
        return RowVectors(self.energies[part], self.mean_squares[part], self.fresh_factors[part])


@dataclass(slots=True, eq=False)
class Block:
    """A block: its columns and its host rows. `SplitParam.share_out` gives it its rows."""

    index: int
    """Rank in backward order: the calendar's name for this block."""
    shape: BlockShape
    """Size of the block, and its position in the parameter."""
    split: SplitParam
    """Parameter that the block is a part of."""
    columns: ColumnVectors
    """Vectors over the block's columns: views of the layout's."""
    host: HostRows = field(init=False)
    """Rows of the deferred columns, views of the parameter's."""
    deferred_columns: Tensor = field(init=False)
    """Column index of each host row, shape (D,), int64; a view of the parameter's."""
    important_columns: Tensor = field(init=False)
    """Column index of each bank row, shape (K,), int64; a view of the parameter's."""
    bank_first: int = field(init=False)
    """Bank row of the block's first important column."""
    deferred: HostColumns = field(init=False)
    """The deferred columns, for the device's kernels."""
    host_shape: tuple[int, int] = field(init=False)
    """(D, O) of this rank's host rows; a tensor's own shape takes longer to ask for."""
    gradient_shape: tuple[int, int] = field(init=False)
    """(D, length of a column) of the block's gradient on this rank's host."""

    @property
    def column_bytes(self) -> int:
        """Bytes of a whole column of weights, over all ranks that have rows of it."""
        return self.split.whole_rows * self.split.param.itemsize

    @property
    def host_elements(self) -> int:
        """Number of elements that this rank's host owns."""
        return self.shape.num_deferred * self.split.num_host_rows


@dataclass(slots=True, eq=False)
class SplitParam(NamedParam):
    """A parameter some of whose columns the device owns, and the host the others."""

    num_rows: int
    """Number of rows on this rank, O: the length of a column on its device."""
    whole_rows: int
    """Number of rows on all ranks together."""
    part: HostPart
    """Rows of this rank that its host works on."""
    num_columns: int
    """Number of columns, I."""
    bank: Bank
    """Bank of the important columns."""
    bank_first: int
    """Bank row of the parameter's first important column."""
    slab_rows: HostRows
    """All host rows that memory is allocated for: as many as the smallest k defers."""
    host: HostRows
    """Host rows in use: the first ones of `slab_rows`."""
    slot_width: int
    """Largest length of a gradient's column on any rank's host, in numbers of its type there."""
    deferred_columns: Tensor
    """Column index of each host row, (D,), int64."""
    important_columns: Tensor
    """Column index of each bank row, (K,), int64."""
    columns: ColumnVectors
    """Vectors over the parameter's columns: views of the layout's."""
    rows: RowVectors
    """Vectors over the parameter's rows: views of the layout's."""
    blocks: list[Block] = field(default_factory=list)
    """Blocks of the columns, in ascending order."""
    bucket: int = 0
    """Index of the bucket that the parameter's gradient is copied in."""
    num_steps: int = 0
    """Number of steps in which the parameter had a gradient."""
    num_host_rows: int = field(init=False)
    """Number of rows of `part`: the length of a column on this rank's host."""
    gradient_width: int = field(init=False)
    """Length of a gradient's column on this rank's host, in numbers of its type there."""
    _host_columns: dict[tuple[int, int], HostColumns] = field(default_factory=dict)
    """Known results of `host_columns`: to make them costs as much as a kernel's launch."""

    def __post_init__(self) -> None:
        """Count the host's rows once: the counts are asked for in every step."""
        NamedParam.__post_init__(self)
        self.num_host_rows = self.part.num_rows
        self.gradient_width = self.slab_rows.staging.shape[1]

    @property
    def bank_last(self) -> int:
        """Bank row after this parameter's last."""
        return self.bank_first + self.important_columns.numel()

    def share_out(self) -> None:
        """Give each block its part of the parameter's rows, one after another."""
        row = rank = 0
        self._host_columns.clear()
        for block in self.blocks:
            next_row, next_rank = row + block.shape.num_deferred, rank + block.shape.num_important
            block.host = self.host.rows(slice(row, next_row))
            block.deferred_columns = self.deferred_columns[row:next_row]
            block.important_columns = self.important_columns[rank:next_rank]
            block.bank_first = self.bank_first + rank
            block.deferred = self.host_columns(row, next_row)
            block.host_shape = block.shape.num_deferred, self.num_host_rows
            block.gradient_shape = block.shape.num_deferred, self.gradient_width
            row, rank = next_row, next_rank

    def host_columns(self, first: int, last: int) -> HostColumns:
        """Return the columns of host rows first..last-1; they are views, and stay true."""
        found = self._host_columns.get((first, last))
        if found is None:
            begins, ends, row = self.num_columns, 0, 0
            for shape in (block.shape for block in self.blocks):
                if first < row + shape.num_deferred and row < last:
                    begins = min(begins, shape.first)
                    ends = max(ends, shape.first + shape.num_columns)
                row += shape.num_deferred
            indices = self.deferred_columns[first:last]
            found = HostColumns(indices, self.columns.host_rows, first, last, begins, ends)
            self._host_columns[first, last] = found
        return found

    @property
    def deferred(self) -> HostColumns:
        """All deferred columns, for the device's kernels."""
        return self.host_columns(0, len(self.deferred_columns))

    def own_part(self, of_bank: Tensor) -> Tensor:
        """Return this host's rows of columns in the bank, (K, O); (K, 0) has none of any host."""
        return self.part.of(of_bank, 1) if of_bank.shape[1] else of_bank

    @property
    def important_masters(self) -> Tensor:
        """Masters of the important columns, (K, O), float32, on the device."""
        return self.bank.master[self.bank_first : self.bank_last]

    def host_cuts(self) -> Iterable[slice]:
        """Return the pieces in which deferred columns pass: a drive's extents, or `PASSING_BYTES`.

        Sizes are those of whole columns, so that all ranks cut alike.
        """
        if self.host.drive is not None:
            return map(self.host.slice_of, self.host.extents)
        return pieces(len(self.deferred_columns), self.whole_rows * self.param.itemsize)

    def host_pieces(self, *, changes: bool = False) -> Iterator[tuple[HostColumns, HostRows]]:
        """Yield the deferred columns and their host rows by `host_cuts`, for work on the weights.

        Args:
            changes: Whether the work changes them.
        """
        passing = self.host.passing(self.host_cuts(), weights_only=not changes, changes=changes)
        for part, rows in passing:
            yield self.host_columns(part.start, part.stop), rows

    def note_owners(self) -> None:
        """Write who owns each column, after `deferred_columns` and `important_columns`."""
        is_important, host_rows = self.columns.is_important, self.columns.host_rows
        is_important.zero_().index_fill_(0, self.important_columns, True)
        count = len(self.deferred_columns)
        ranks = torch.arange(count, dtype=torch.int32, device=host_rows.device)
        host_rows.fill_(-1).index_copy_(0, self.deferred_columns, ranks)

    def matrix(self, tensor: Tensor) -> Tensor:
        """View this rank's part of the parameter, or of its gradient, as (O, I)."""
        return tensor if tensor.ndim == 2 else tensor.reshape(self.num_rows, self.num_columns)

    def show_important(self) -> None:
        """Write the important columns' masters into the device's weights."""
        with self.held(changes=True):
            self.write_important()

    def write_important(self) -> None:
        """Do as `show_important`, to weights that are on the device."""
        fresh_OK = self.important_masters.t().to(self.param.dtype)
        self.weight().index_copy_(1, self.important_columns, fresh_OK)

    def weight(self) -> Tensor:
        """Return the device's weights as an (O, I) view; streamed ones have to be `held`."""
        assert self.page is None or self.page.is_here, "the weights are at home"
        data = self.data
        return data if data.ndim == 2 else data.view(self.num_rows, self.num_columns)


@dataclass(slots=True, eq=False)
class Bucket:
    """Parameters whose columns are copied together, in backward order."""

    index: int
    """Rank in backward order."""
    splits: list[SplitParam]
    """Parameters of the bucket, in backward order: neighbours."""
    blocks: list[Block]
    """All blocks of these parameters, in order."""
    columns: ColumnVectors
    """Vectors over the columns of these parameters: views of the layout's."""
    rows: RowVectors
    """Vectors over the rows of these parameters: views of the layout's."""

    @property
    def page(self) -> Page | None:
        """Page that all of these parameters are on; None where they stay on the device."""
        return self.splits[0].page

    def held(self, *, changes: bool) -> AbstractContextManager[None]:
        """Have the parameters on the device inside of a `with` block, as `NamedParam.held`."""
        return self.splits[0].held(changes=changes)


def by_bucket(blocks: Iterable[Block]) -> dict[int, list[Block]]:
    """Return the blocks by the index of their bucket, in their order."""
    groups: dict[int, list[Block]] = {}
    for block in blocks:
        groups.setdefault(block.split.bucket, []).append(block)
    return groups


@dataclass(slots=True, eq=False)
class Layout:
    """Place of every trainable parameter, and the vectors over all columns and rows."""

    splits: list[SplitParam]
    """Parameters whose columns are shared out, in registration order."""
    residents: list[Resident]
    """Parameters that stay on the device whole, in registration order."""
    banks: list[Bank]
    """Device memory of the important columns."""
    members: list[list[SplitParam]]
    """Parameters with columns in each bank, in the order of their rows."""
    blocks: list[Block]
    """All blocks, in backward order."""
    buckets: list[Bucket]
    """All buckets, in backward order."""
    slabs: HostSlabs
    """Host memory of the deferred columns."""
    columns: ColumnVectors
    """Vectors over the columns of all split parameters, one parameter after another."""
    rows: RowVectors
    """Vectors over the rows of all split parameters; empty where there are no fresh steps."""
    topk_ratio: float
    """Ratio k that each block's number of important columns follows."""
    least_topk_ratio: float
    """Smallest ratio k for which host memory is allocated."""
    shards: Shards
    """Ranks that the parameters' rows are spread over."""
    shares: HostShares
    """Ranks whose hosts share the work on the parameters' rows."""
    version: int = 0
    """Count of the times that tensors were replaced."""
    pages: dict[Page, list[SplitParam]] = field(default_factory=dict)
    """Parameters of each page, in registration order; empty where no weight is streamed."""

    def __post_init__(self) -> None:
        """Find each page's parameters once: every bucket asks for them."""
        for split in self.splits:
            if split.page is not None:
                self.pages.setdefault(split.page, []).append(split)

    @property
    def gather(self) -> Gather | None:
        """Function that completes uploaded columns; None where this rank's host has all rows."""
        return None if self.shares.group is None else self.shares.gather

    @property
    def places(self) -> list[SplitParam | Resident]:
        """Places of all parameters, split ones first."""
        return [*self.splits, *self.residents]

    @property
    def widths(self) -> list[int]:
        """Number of columns of each block, in the order of the vectors that span all columns."""
        return [block.shape.num_columns for split in self.splits for block in split.blocks]
