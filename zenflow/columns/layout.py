"""Layout: the records that say which column of which parameter lives where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zenflow.columns.device_rows import Bank, Resident
from zenflow.columns.host_rows import HostRows, HostSlabs, UploadBuffer
from zenflow.lanes.completion import Completion, finished
from zenflow.rule.blocks import BlockShape


@dataclass(slots=True, eq=False)
class ColumnVectors:
    """What is known of every column, in vectors over all split parameters, on the device."""

    energies: Tensor
    """Squared L2 norm of each column of this step's gradient, float32; 0 without a gradient."""
    scores: Tensor
    """Moving average of the energies, float32."""
    is_important: Tensor
    """Whether the device owns the column, bool."""

    @classmethod
    def zeros(cls, num_columns: int, device: torch.device) -> ColumnVectors:
        """Make vectors for this many columns."""
        return cls(
            energies=torch.zeros(num_columns, device=device),
            scores=torch.zeros(num_columns, device=device),
            is_important=torch.zeros(num_columns, dtype=torch.bool, device=device),
        )

    def part(self, first: int, last: int) -> ColumnVectors:
        """Return views of columns first..last-1."""
        part = slice(first, last)
        return ColumnVectors(self.energies[part], self.scores[part], self.is_important[part])


@dataclass(slots=True, eq=False)
class Block:
    """One block with its host rows and its place in its parameter and bank."""

    index: int
    """Rank in backward order: the calendar's name for this block."""
    shape: BlockShape
    split: SplitParam
    host: HostRows
    deferred_columns: Tensor
    """Column index of each host row, shape (D,), int64; a view of the parameter's."""
    important_columns: Tensor
    """Column index of each bank row, shape (K,), int64; a view of the parameter's."""
    bank_first: int
    columns: ColumnVectors
    """This block's part of the vectors that span all columns."""
    count: int = 0
    """Gradients in the open window, n."""
    accumulator: int = 0
    """Which accumulator the open window uses."""
    wants_selection: bool = False
    landing: Landing | None = None
    """The update in flight."""
    staging_free: Completion = field(default_factory=finished)
    """The last host task that reads the staged gradient: the next copy into it comes after."""
    last_update: Completion = field(default_factory=finished)
    """The last host update: updates of one block run one after another."""

    @property
    def host_shape(self) -> tuple[int, int]:
        """(D, O) of the host's rows; a tensor's own shape takes longer to ask for."""
        return self.shape.num_deferred, self.shape.num_rows


@dataclass(slots=True, eq=False)
class Landing:
    """One block's update in flight.

    `computed` is set by the host worker. The upload may begin once nothing reads the weights any
    more in the step of the landing; `uploaded` is then made, and set by the h2d lane.
    """

    block: Block
    values: Tensor
    """What is uploaded, (D, O) in the parameter's dtype: a view of `buffer`, or the staging."""
    buffer: UploadBuffer | None
    """None at a lag of 0: the update then overwrites the gradient it has read."""
    land_step: int
    opened: int
    """Step after which the window began: its oldest gradient is of the step after."""
    copied: Sequence[Completion]
    """Copies of the window's last gradient."""
    computed: Completion
    uploaded: Completion | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that go up."""
        return self.values.numel() * self.values.element_size()


@dataclass(slots=True, eq=False)
class SplitParam:
    """A parameter whose columns are shared out between device and host."""

    param: Tensor
    name: str
    group: int
    num_rows: int
    num_columns: int
    bank: Bank
    bank_first: int
    room: HostRows
    """All host rows that there is memory for."""
    host: HostRows
    """The first of them, which are in use."""
    deferred_columns: Tensor
    important_columns: Tensor
    columns: ColumnVectors
    """This parameter's part of the vectors that span all columns."""
    blocks: list[Block] = field(default_factory=list)
    bucket: int = 0

    @property
    def bank_last(self) -> int:
        """The bank row after this parameter's last."""
        return self.bank_first + self.important_columns.numel()

    def share_out(self) -> None:
        """Give each block its part of the parameter's rows, one after another."""
        row = rank = 0
        for block in self.blocks:
            next_row, next_rank = row + block.shape.num_deferred, rank + block.shape.num_important
            block.host = self.host.rows(row, next_row)
            block.deferred_columns = self.deferred_columns[row:next_row]
            block.important_columns = self.important_columns[rank:next_rank]
            block.bank_first = self.bank_first + rank
            row, rank = next_row, next_rank

    def matrix(self, tensor: Tensor) -> Tensor:
        """View the parameter's data, or its gradient, as (O, I)."""
        return tensor if tensor.ndim == 2 else tensor.reshape(self.num_rows, self.num_columns)

    def weight(self) -> Tensor:
        """Return the device's weights as an (O, I) view."""
        data = self.param.data
        return data if data.ndim == 2 else data.view(self.num_rows, self.num_columns)


@dataclass(slots=True, eq=False)
class Bucket:
    """Parameters whose columns are copied together, in backward order."""

    index: int
    splits: list[SplitParam] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    """All blocks of these parameters, in order."""


@dataclass(slots=True, eq=False)
class Layout:
    """Every trainable parameter's place, and the vectors that span all columns."""

    splits: list[SplitParam]
    residents: list[Resident]
    banks: list[Bank]
    members: list[list[SplitParam]]
    """For each bank the parameters with columns in it, in the order of their rows."""
    blocks: list[Block]
    buckets: list[Bucket]
    slabs: HostSlabs
    columns: ColumnVectors
    num_accumulators: int
    """Of each block; what the config and a controller make necessary."""
    topk_ratio: float
    """By which each block's number of important columns came about."""
    least_topk_ratio: float
    """The smallest for which there is host memory."""
    version: int = 0
    """Goes up whenever tensors are replaced."""

    @property
    def widths(self) -> list[int]:
        """Columns of each block, in the order of the vectors that span all columns."""
        return [block.shape.num_columns for split in self.splits for block in split.blocks]
