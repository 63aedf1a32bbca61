"""The host's rows of the deferred columns, in slabs that are allocated once, or on a drive.

A split parameter's host side is laid out column by column, (D, O) for D deferred columns: a column
is one contiguous row, moving a column is a row copy, and Adam's step count is per row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zenflow.columns.byte_memory import ByteMemory
from zenflow.device.base import AbstractDevice
from zenflow.drive.extents import Extent, RowState
from zenflow.drive.lane import DriveLane
from zenflow.host import memory as host_memory
from zenflow.host.compact import CompactState, Rounding, keys_of
from zenflow.host.float_state import FloatState

ROW_STATE = ("step", "master", "exp_avg", "exp_avg_sq")
"""Names of the tensors that move with a column when it changes owner, as the device has them."""

ALIGNMENT = 64
"""Number of bytes at whose multiples a block's memory begins: a cache line."""
PIECE_ELEMENTS = 1 << 20
"""Elements that are converted at once, since a conversion takes several times their memory."""


@dataclass(frozen=True, slots=True)
class MovingColumns:
    """AdamW's state of n columns that change owner: copies, whose fields are `ROW_STATE`."""

    step: Tensor
    """Number of Adam steps that each column has taken, (n,), int64."""
    master: Tensor
    """True weights, (n, O), float32."""
    exp_avg: Tensor
    """First moments, (n, O), float32."""
    exp_avg_sq: Tensor
    """Second moments, (n, O), float32; (n, 0) in factored state."""


@dataclass(slots=True, eq=False)
class HostRows:
    """Host-owned columns as rows: D of them, with O elements each."""

    state: RowState
    """True weights and AdamW's moments of the columns, (D, O). For those of a drive it has shapes
    alone: numbers that mean nothing, and can't be written."""
    step: Tensor
    """Number of Adam steps that each row has taken, (D,), int64."""
    staging: Tensor
    """Gradients of one step, (D, length of a column) in their type on the host; pinned where the
    device is a GPU."""
    first: int
    """Number of the first row's first element, counted over all the parameter's host rows, whose
    elements on other ranks count too. It goes by the row, whatever column is there."""
    stride: int
    """Number of elements of a row on all ranks."""
    seed: int
    """Number of the parameter. With it random rounding draws its bits."""
    drive: DriveLane | None = None
    """Lane of the drive that the state is on; None for a state in memory."""
    extents: Sequence[Extent] = ()
    """Extents of all these rows, in order; none in memory."""

    def rows(self, part: slice) -> HostRows:
        """Return the views of a slice of the rows; on a drive the slice is of whole extents."""
        extents = self.extents
        if extents:
            begin = extents[0].first + (part.start or 0)
            end = begin + len(self.step[part])
            extents = [each for each in extents if begin <= each.first and each.last <= end]
        return replace(
            self,
            state=self.state.rows(part),
            step=self.step[part],
            staging=self.staging[part],
            first=self.first + (part.start or 0) * self.stride,
            extents=extents,
        )

    def passing(
        self,
        cuts: Iterable[slice] | None = None,
        *,
        weights_only: bool = False,
        changes: bool = False,
    ) -> Iterator[tuple[slice, HostRows]]:
        """Yield the rows in pieces, each with its state in memory until the next one.

        Args:
            cuts: Pieces of rows in memory; None for some of about `PIECE_ELEMENTS` elements. A
                drive has its extents.
            weights_only: Whether only the weights are read, and the moments may be anything.
            changes: Whether the state is changed.
        """
        if self.drive is None:
            for part in self.pieces() if cuts is None else cuts:
                yield part, self.rows(part)
            return
        passing = self.drive.passing(self.extents, weights_only=weights_only, changes=changes)
        for extent, state in passing:
            part = self.slice_of(extent)
            yield part, replace(self.rows(part), state=state, drive=None, extents=())

    def slice_of(self, extent: Extent) -> slice:
        """Return the rows of one of the extents."""
        begin = self.extents[0].first
        return slice(extent.first - begin, extent.last - begin)

    def copies(self, rows: Tensor) -> MovingColumns:
        """Return the state of the rows of some indices, (n,) int64, as float32 copies."""
        numbers = [
            torch.empty(len(rows), width, dtype=torch.float32, device="cpu")
            for width in self.widths
        ]
        return self.copied(rows, numbers)

    def copied(self, rows: Tensor, numbers: Sequence[Tensor]) -> MovingColumns:
        """Do as `copies`, to these outputs for weights and moments, (n, O), float32."""
        self.state.copy_rows(rows, numbers)
        return MovingColumns(self.step[rows], *numbers)

    def put(self, rows: Tensor, columns: MovingColumns) -> None:
        """Write columns that have come to the host into rows of some indices, (n,) int64."""
        self.step[rows] = columns.step
        numbers = columns.master, columns.exp_avg, columns.exp_avg_sq
        if isinstance(self.state, CompactState):
            keys = keys_of(self.seed, columns.step)
            rounding = Rounding.drawn(keys, self.first + rows * self.stride, self.shape[1])
            self.state.put(rows, *numbers, rounding)
        else:
            self.state.put(rows, *numbers)

    def move(self, target: Tensor, source: Tensor) -> None:
        """Copy the state of rows of some indices to rows of others, (n,) int64 each."""
        for tensor in (self.step, *self.state.tensors()):
            tensor[target] = tensor[source]

    @property
    def widths(self) -> tuple[int, int, int]:
        """Lengths of a row's weights and moments as numbers; no second ones in factored state."""
        num_rows = self.shape[1]
        return num_rows, num_rows, num_rows * self.state.HAS_SECOND

    @property
    def shape(self) -> torch.Size:
        """(D, O)."""
        return self.state.tensors()[0].shape

    def tensors(self) -> dict[str, Tensor]:
        """Return all live tensors by their names in a checkpoint; a drive's states are none."""
        if self.drive is not None:
            return {"step": self.step}
        return {"step": self.step, **self.state_by_name()}

    def state_by_name(self) -> dict[str, Tensor]:
        """Return the tensors of `state` by their names in a checkpoint."""
        return dict(zip(type(self.state).NAMES, self.state.tensors(), strict=True))

    def weights(self, dtype: torch.dtype) -> Tensor:
        """Return the true weights in this dtype, (D, O); the live ones where nothing changes."""
        if self.drive is None and isinstance(self.state, FloatState):
            return self.state.master.to(dtype)
        found = torch.empty(self.shape, dtype=dtype, device="cpu")
        for part, rows in self.passing(weights_only=True):
            found[part] = rows.state.weights()
        return found

    def moment(self, name: str) -> Tensor:
        """Return a moment by its name, (D, O), float32; the live one where it is float32.

        Factored state has no second moments: they are (D, 0).
        """
        if self.drive is None and isinstance(self.state, FloatState):
            return self.state.exp_avg if name == "exp_avg" else self.state.exp_avg_sq
        place = ROW_STATE.index(name) - 1
        size = len(self.step), self.widths[place]
        found = torch.empty(size, dtype=torch.float32, device="cpu")
        for part, rows in self.passing():
            found[part] = rows.state.numbers()[place]
        return found

    def set_weights(self, weights: Tensor) -> None:
        """Take over true weights, (D, O) in any dtype and on any device, rounded to nearest."""
        for part, rows in self.passing(changes=True):
            rows.state.set_weights(weights[part].to("cpu"))

    def set_moments(self, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
        """Take over moments, (D, O), float32, on any device, rounded to nearest."""
        for part, rows in self.passing(changes=True):
            rows.state.set_moments(exp_avg[part].to("cpu"), exp_avg_sq[part].to("cpu"))

    def take_up(self, other: RowState) -> None:
        """Take over weights and moments; of another format they are rounded to nearest."""
        for part, rows in self.passing(changes=True):
            own, there = rows.state, other.rows(part)
            if type(own) is type(there):
                for tensor, values in zip(own.tensors(), there.tensors(), strict=True):
                    tensor.copy_(values)
            else:
                weights, *moments = there.numbers()
                own.set_weights(weights)
                own.set_moments(*moments)

    def begin_anew(self) -> None:
        """Forget moments and steps; on a drive the weights too, which are to be set."""
        self.step.zero_()
        if self.drive is not None:
            self.drive.forget(self.extents)
            return
        for tensor in self.state.tensors()[self.state.NUM_WEIGHTS :]:
            tensor.zero_()

    def pieces(self) -> Iterator[slice]:
        """Yield slices of the rows, of about `PIECE_ELEMENTS` elements."""
        num_rows, num_elements = self.shape
        step = max(1, PIECE_ELEMENTS // max(1, num_elements))
        for low in range(0, num_rows, step):
            yield slice(low, low + step)


@dataclass(frozen=True, slots=True)
class RowShape:
    """Host rows of one parameter to allocate."""

    num_columns: int
    """Largest number of columns that may be deferred, D."""
    num_rows: int
    """Number of the parameter's rows on this host, O."""
    gradient_width: int
    """Length of a gradient's column on this host, in numbers of `dtype`."""
    dtype: torch.dtype
    """Type of the gradients on the host."""
    whole_rows: int
    """Number of the parameter's rows on all hosts."""
    first_row: int
    """First of this host's rows."""


class HostSlabs:
    """Large allocations, one for each field of `HostRows`, handed out parameter by parameter."""

    def __init__(
        self,
        device: AbstractDevice,
        shapes: Sequence[RowShape],
        kind: type[RowState],
        *,
        on_drive: bool = False,
    ) -> None:
        """Allocate for all split parameters, with states of this kind unless a drive has them."""
        self._kind = kind
        self._on_drive = on_drive
        totals = [0] * len(kind.DTYPES)
        for shape in () if on_drive else shapes:
            for index, width in enumerate(kind.widths(shape.num_rows)):
                totals[index] += shape.num_columns * width
        self._state = [
            host_memory.zeroed(total, dtype)
            for total, dtype in zip(totals, kind.DTYPES, strict=True)
        ]
        self.pinned_bytes = sum(_staging_bytes(shape) for shape in shapes)
        """Bytes of one step's gradients, which are pinned on a GPU."""
        # Whole lines, as torch saves views of any dtype with all of their memory.
        self.staging = ByteMemory(device.pinned_slab(aligned(self.pinned_bytes), torch.uint8))
        """Memory of these gradients."""
        self._elements = [0] * len(totals)
        self._byte = 0
        self._num_taken = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all slabs together."""
        return sum(slab.nbytes for slab in self._state) + self.pinned_bytes

    def take(self, shape: RowShape) -> HostRows:
        """Return the next parameter's piece of every slab."""
        views = []
        for index, width in enumerate(self._kind.widths(shape.num_rows)):
            if self._on_drive:  # a shape without memory, which torch does not let be written
                nothing = torch.zeros((), dtype=self._kind.DTYPES[index], device="cpu")
                views.append(nothing.expand(shape.num_columns, width))
                continue
            begin = self._elements[index]
            self._elements[index] += shape.num_columns * width
            piece = self._state[index][begin : self._elements[index]]
            views.append(piece.view(shape.num_columns, width))
        size = shape.num_columns, shape.gradient_width
        staging = self.staging.matrix(self._byte, size, shape.dtype)
        self._byte += _staging_bytes(shape)
        self._num_taken += 1
        return HostRows(
            state=self._kind(*views),
            step=torch.zeros(shape.num_columns, dtype=torch.int64, device="cpu"),
            staging=staging,
            first=shape.first_row,
            stride=shape.whole_rows,
            seed=self._num_taken,
        )


def _staging_bytes(shape: RowShape) -> int:
    return room_bytes(shape.num_columns * shape.gradient_width, shape.dtype)


def room_bytes(count: int, dtype: torch.dtype) -> int:
    """Return the bytes in which gradients of so many numbers wait.

    Gradients of eight bits lie side by side: so a rank that has 1/n of all rows has 1/n of the
    memory to the byte, and its rooms are full when those of all rows would be.
    """
    size = count * dtype.itemsize
    return size if dtype == torch.uint8 else aligned(size)


def aligned(num_bytes: int) -> int:
    """Return the next multiple of `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
