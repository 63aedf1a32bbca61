"""Layout: the records that say which column of which parameter lives where."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from zenflow.columns.device_rows import Bank, NamedParam, Resident
from zenflow.columns.gradient_queue import StagedGradient
from zenflow.columns.host_rows import HostRows, HostSlabs
from zenflow.columns.host_shares import HostPart, HostShares
from zenflow.columns.shards import Shards
from zenflow.columns.upload_buffer import UploadBuffer
from zenflow.device.base import Gather
from zenflow.lanes.completion import Completion, already_done
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
    mean_squares: Tensor
    """AdamW's second moment of each column's clipped gradients, in the mean over its elements,
    float32; not bias-corrected."""
    fresh_factors: Tensor
    """Factor on each column of this step's gradient in the fresh step, float32."""

    def part(self, first: int, last: int) -> ColumnVectors:
        """Return views of columns first..last-1."""
        part = slice(first, last)
        return ColumnVectors(
            *(self.energies[part], self.scores[part], self.is_important[part]),
            *(self.mean_squares[part], self.fresh_factors[part]),
        )


@dataclass(slots=True, eq=False)
class RowVectors:
    """What fresh steps need of every row, in vectors over all split parameters, on the device."""

    energies: Tensor
    """Squared L2 norm of each row of this step's gradient, float32; 0 without a gradient."""
    mean_squares: Tensor
    """AdamW's second moment of each row's clipped gradients, in the mean over its elements,
    float32; not bias-corrected."""
    fresh_factors: Tensor
    """Factor on each row of this step's gradient in the fresh step, float32."""

    def part(self, first: int, last: int) -> RowVectors:
        """Return views of rows first..last-1."""
        part = slice(first, last)
        return RowVectors(self.energies[part], self.mean_squares[part], self.fresh_factors[part])


@dataclass(slots=True, eq=False)
class Block:
    """One block with its host rows and its place in its parameter and bank.

    `SplitParam.share_out` gives it its rows.
    """

    index: int
    """Rank in backward order: the calendar's name for this block."""
    shape: BlockShape
    """Size of the block, and its place in its parameter."""
    split: SplitParam
    """Parameter that it is a part of."""
    columns: ColumnVectors
    """This block's part of the vectors that span all columns."""
    host: HostRows = field(init=False)
    """Rows of the deferred columns, views of the parameter's."""
    deferred_columns: Tensor = field(init=False)
    """Column index of each host row, shape (D,), int64; a view of the parameter's."""
    important_columns: Tensor = field(init=False)
    """Column index of each bank row, shape (K,), int64; a view of the parameter's."""
    bank_first: int = field(init=False)
    """Bank row of the block's first important column."""
    count: int = 0
    """Number of gradients in the open window, n."""
    queue: list[StagedGradient] = field(default_factory=list)
    """Gradients that wait on the host, the oldest first; the exact rule's."""
    accumulator: int = 0
    """Index of the sum that the open window uses; the published rule's."""
    wants_selection: bool = False
    """Whether columns are selected anew when the window ends."""
    landing: Landing | None = None
    """The update in flight, if there is one."""
    staging_free: Completion = field(default_factory=already_done)
    """The last host task that reads the staged gradient: the next copy into it comes after."""
    last_update: Completion = field(default_factory=already_done)
    """The last host update: updates of one block run one after another."""

    @property
    def host_shape(self) -> tuple[int, int]:
        """(D, O) of this rank's host rows; a tensor's own shape takes longer to ask for."""
        return self.shape.num_deferred, self.split.num_host_rows

    @property
    def host_elements(self) -> int:
        """Number of elements that this rank's host owns."""
        return self.shape.num_deferred * self.split.num_host_rows

    def next_view_of(self, buffer: UploadBuffer) -> Tensor:
        """Return a buffer's next piece as this block's upload, (D, O) in the weights' dtype."""
        return buffer.next_view(self.host_shape, self.split.param.dtype)


@dataclass(slots=True, eq=False)
class Landing:
    """One block's update in flight, from its start on the host to its landing.

    The upload begins once nothing reads the weights any more in the step of the landing.
    """

    block: Block
    """The block whose weights are updated."""
    values: Tensor
    """Weights to upload, (D, O) in the parameter's dtype: a view of `buffer`, or the staging."""
    buffer: UploadBuffer | None
    """Buffer of `values`. None at a lag of 0: the update overwrites the gradient it has read."""
    land_step: int
    """Step by whose end the weights are on the device."""
    opened: int
    """Step after which the window began: its oldest gradient is of the step after."""
    copied: Sequence[Completion]
    """Copies of the window's last gradient, where the landing's step has to wait for them."""
    computed: Completion
    """The host's update."""
    uploaded: Completion | None = None
    """Copy to the device; None until it is queued."""

    def begin(self) -> None:
        """Let the block have this update in flight; its buffer is then in use."""
        self.block.landing = self
        if self.buffer is not None:
            self.buffer.num_open += 1

    def end(self) -> None:
        """Let the block have no update in flight; its place in the buffer is then free."""
        self.block.landing = None
        if self.buffer is not None:
            self.buffer.num_open -= 1


@dataclass(slots=True, eq=False)
class SplitParam(NamedParam):
    """A parameter whose columns are shared out between device and host."""

    num_rows: int
    """Number of rows on this rank, O: the length of a column here."""
    whole_rows: int
    """Number of rows on all ranks together."""
    part: HostPart
    """Rows that this rank's host works on, of those on this rank."""
    num_columns: int
    """Number of columns, I."""
    bank: Bank
    """Bank of its important columns."""
    bank_first: int
    """Bank row of its first important column."""
    room: HostRows
    """All host rows that there is memory for."""
    host: HostRows
    """The first rows of `room`, which are in use."""
    deferred_columns: Tensor
    """Column index of each host row, (D,), int64."""
    important_columns: Tensor
    """Column index of each bank row, (K,), int64."""
    columns: ColumnVectors
    """This parameter's part of the vectors that span all columns."""
    rows: RowVectors
    """Its part of the vectors that span all rows."""
    blocks: list[Block] = field(default_factory=list)
    """Blocks of its columns, in ascending order."""
    bucket: int = 0
    """Index of the bucket that it is copied in."""
    num_steps: int = 0
    """Number of steps in which it had a gradient."""
    num_host_rows: int = field(init=False)
    """Number of rows of `part`: the length of a column on this rank's host."""

    def __post_init__(self) -> None:
        """Count the host's rows once."""
        NamedParam.__post_init__(self)
        self.num_host_rows = self.part.num_rows

    @property
    def bank_last(self) -> int:
        """Bank row after this parameter's last."""
        return self.bank_first + self.important_columns.numel()

    def share_out(self) -> None:
        """Give each block its part of the parameter's rows, one after another."""
        row = rank = 0
        for block in self.blocks:
            next_row, next_rank = row + block.shape.num_deferred, rank + block.shape.num_important
            block.host = self.host.rows(slice(row, next_row))
            block.deferred_columns = self.deferred_columns[row:next_row]
            block.important_columns = self.important_columns[rank:next_rank]
            block.bank_first = self.bank_first + rank
            row, rank = next_row, next_rank

    def matrix(self, tensor: Tensor) -> Tensor:
        """View this rank's part of the parameter, or of its gradient, as (O, I)."""
        return tensor if tensor.ndim == 2 else tensor.reshape(self.num_rows, self.num_columns)

    def show_important(self) -> None:
        """Write the important columns' masters into the device's weights."""
        fresh_OK = self.bank.master[self.bank_first : self.bank_last].t().to(self.param.dtype)
        self.weight().index_copy_(1, self.important_columns, fresh_OK)

    def weight(self) -> Tensor:
        """Return the device's weights as an (O, I) view."""
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
    """Their part of the vectors that span all columns."""
    rows: RowVectors
    """Their part of the vectors that span all rows."""


def by_bucket(blocks: Iterable[Block]) -> dict[int, list[Block]]:
    """Return the blocks by the index of their bucket, in their order."""
    groups: dict[int, list[Block]] = {}
    for block in blocks:
        groups.setdefault(block.split.bucket, []).append(block)
    return groups


@dataclass(slots=True, eq=False)
class Layout:
    """Every trainable parameter's place, and the vectors that span all columns."""

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
    """Vectors over their rows, in the same order; empty where there are no fresh steps."""
    topk_ratio: float
    """Ratio by which each block's number of important columns came about."""
    least_topk_ratio: float
    """Smallest ratio for which there is host memory."""
    shards: Shards
    """Ranks that the parameters' rows are spread over."""
    shares: HostShares
    """Ranks whose hosts share the work on the parameters' rows."""
    version: int = 0
    """Count of the times that tensors were replaced."""

    @property
    def gather(self) -> Gather | None:
        """What completes uploads on the device; None where this rank's host has all rows."""
        return None if self.shares.group is None else self.shares.gather

    @property
    def places(self) -> list[SplitParam | Resident]:
        """Places of all parameters, split ones first."""
        return [*self.splits, *self.residents]

    @property
    def widths(self) -> list[int]:
        """Number of columns of each block, in the order of the vectors that span all columns."""
        return [block.shape.num_columns for split in self.splits for block in split.blocks]
