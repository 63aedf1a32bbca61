"""The ring through which released gradients leave a GPU: bounded memory, used in a circle.

The deferred columns of a gradient are packed into it on the compute stream, at the moment at
which backward has finished the gradient. The gradient's memory is then free, whoever owns it.
The d2h lane sends what lies in the ring. Where the link is late, the ring is full, and the compute
stream waits for room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zenflow.columns.byte_memory import ByteMemory
from zenflow.columns.layout import Block
from zenflow.device.base import AbstractDevice
from zenflow.lanes.completion import Completion
from zenflow.step.ring_size import PIECES, aligned, ring_bytes


@dataclass(frozen=True, slots=True)
class PackJob:
    """Deferred columns low..high-1 of one block's gradient, on their way to the host."""

    block: Block
    """The block."""
    grad: Tensor
    """Gradient of its parameter, (O, I)."""
    staged: Tensor
    """Host's buffer of all its deferred columns, (D, O)."""
    low: int
    """First row."""
    high: int
    """Row after the last."""

    num_bytes: int = field(init=False)
    """Bytes of the columns."""

    def __post_init__(self) -> None:
        """Count the bytes once."""
        num_bytes = (self.high - self.low) * self.block.split.num_rows * self.staged.itemsize
        object.__setattr__(self, "num_bytes", num_bytes)

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the block: a view costs the interpreter as much as an operation."""
        return self.high - self.low == self.block.shape.num_deferred

    @property
    def columns(self) -> Tensor:
        """Indices of the columns, (high - low,), int64."""
        columns = self.block.deferred_columns
        return columns if self.is_whole else columns[self.low : self.high]

    @property
    def host(self) -> Tensor:
        """Host's buffer of the columns, (high - low, O)."""
        return self.staged if self.is_whole else self.staged[self.low : self.high]

    def part(self, low: int, high: int) -> PackJob:
        """Return the same for columns low..high-1."""
        return PackJob(self.block, self.grad, self.staged, low, high)


class GradientRing:
    """Packs columns into bounded device memory, in order; each piece stays until it was sent."""

    def __init__(
        self, device: AbstractDevice, buffers: Iterable[Tensor], *, wait_timeout: float
    ) -> None:
        """Allocate memory for host buffers (D, O) of which each is filled once a step."""
        self._device = device
        self._wait_timeout = wait_timeout
        num_bytes = ring_bytes((len(buffer), buffer[:1].nbytes) for buffer in buffers)
        self.num_bytes = num_bytes
        """Bytes of device memory."""
        self._memory = ByteMemory(
            torch.empty(num_bytes, dtype=torch.uint8, device=device.torch_device)
        )
        self._next = 0
        self._taken: deque[tuple[int, int, list[Completion]]] = deque()

    def pieces(self, jobs: list[PackJob]) -> Iterator[list[PackJob]]:
        """Yield the jobs in pieces of at most a quarter of the ring; large jobs are cut."""
        most = self.num_bytes // PIECES
        piece: list[PackJob] = []
        filled = 0
        for job in jobs:
            column_bytes = job.num_bytes // (job.high - job.low)
            share = max(1, most // aligned(column_bytes))
            for low in range(job.low, job.high, share):
                high = min(low + share, job.high)
                part = job if high - low == job.high - job.low else job.part(low, high)
                size = aligned(part.num_bytes)
                if piece and filled + size > most:
                    yield piece
                    piece, filled = [], 0
                piece.append(part)
                filled += size
        if piece:
            yield piece

    def pack(
        self,
        piece: list[PackJob],
        sent: Completion,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> list[tuple[Tensor, Tensor]]:
        """Pack a piece on the compute stream; its room stays until `hold`'s work has ended too.

        Args:
            piece: One of `pieces`.
            sent: The copy that is going to send it; the room is its own until then.
            waiting: Encloses a wait for room.

        Returns:
            (packed columns (D, O), host's buffer (D, O)) of each job.
        """
        first = self._make_room(sum(aligned(job.num_bytes) for job in piece), waiting)
        packed = []
        at = first
        for job in piece:
            host_DO = job.host
            room = self._memory.matrix(at, (job.high - job.low, host_DO.shape[1]), host_DO.dtype)
            torch.index_select(job.grad.t(), 0, job.columns, out=room)
            packed.append((room, host_DO))
            at += aligned(job.num_bytes)
        self._next = at
        self._taken.append((first, at, [sent]))
        return packed

    def hold(self, readers: Sequence[Completion]) -> None:
        """Keep the room of the last piece until these copies have read it as well."""
        self._taken[-1][2].extend(readers)

    def _make_room(
        self, num_bytes: int, waiting: Callable[[], AbstractContextManager[None]]
    ) -> int:
        """Return where the next bytes go; the compute stream waits for what was there."""
        wraps = self._next + num_bytes > self.num_bytes
        first = 0 if wraps else self._next
        last = first + num_bytes
        while self._taken:
            # The oldest is the next in the circle, but for those that a wrap passes over.
            near = self._taken if wraps else (self._taken[0],)
            if not any(low < last and first < high for low, high, _ in near):
                break
            for reader in self._taken.popleft()[2]:
                # Else the host has seen its end, before what it launches from now on.
                if not reader.has_succeeded:
                    with waiting():
                        reader.wait_launched(self._wait_timeout)
                        self._device.order_after(reader)
        return first
