"""The ring through which released gradients leave a GPU: bounded memory, used in a circle.

When backward has finished a gradient, its deferred columns are packed into the ring on the compute
stream. The gradient's memory is then free, whoever owns it. The d2h lane sends the packed columns
from the ring. Where the link is late, the ring is full, and the compute stream waits for a slot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor

from zenflow.columns.byte_memory import ByteMemory
from zenflow.columns.layout import Block
from zenflow.device.base import AbstractDevice
from zenflow.device.kernels.base import FreshMove, HostColumns
from zenflow.lanes.lease import Lease
from zenflow.rule.sizes import PIECES, aligned, ring_bytes

_slot_bytes = attrgetter("slot_bytes")


@dataclass(slots=True, eq=False)
class PackJob:
    """Deferred columns low..high-1 of one block's gradient, on their way to the host."""

    block: Block
    """Block that the columns are of."""
    grad: Tensor
    """Gradient of the block's parameter, (O, I)."""
    columns: HostColumns
    """Columns that are to be packed."""
    host: Tensor
    """Host's buffer of the columns, (high - low, length of a column), in their type there."""
    low: int
    """First of the block's host rows."""
    high: int
    """Host row after the last one."""
    num_bytes: int
    """Bytes of the columns on this rank."""
    slot_bytes: int
    """Bytes of the slot in the ring, whole lines, as many on every rank: all ranks cut alike."""
    move: FreshMove | None
    """Fresh step to take while the columns are packed; None for none."""

    @classmethod
    def of(
        cls, block: Block, grad: Tensor, host: Tensor, move: FreshMove | None = None
    ) -> PackJob:
        """Return the job for all of a block's deferred columns, without a view, which costs time.

        Args:
            block: The block.
            grad: Gradient of its parameter, (O, I).
            host: Host's buffer of all its deferred columns, (D, length of a column).
            move: Fresh step to take on the way; None for none.
        """
        count, width = block.gradient_shape
        num_bytes = count * width * host.itemsize
        slot_bytes = aligned(count * block.split.slot_width * host.itemsize)
        return cls(block, grad, block.deferred, host, 0, count, num_bytes, slot_bytes, move)

    def part(self, low: int, high: int) -> PackJob:
        """Return a whole job's part for columns low..high-1."""
        split, host = self.block.split, self.host[low:high]
        first = self.columns.first_row
        columns = split.host_columns(first + low, first + high)
        slot_bytes = aligned((high - low) * split.slot_width * host.itemsize)
        sizes = host.nbytes, slot_bytes
        return PackJob(self.block, self.grad, columns, host, low, high, *sizes, self.move)


@dataclass(slots=True, eq=False)
class _Run:
    """Jobs of one gradient that lie in the ring as on the host, one after another."""

    first: int
    """First byte in the ring."""
    jobs: list[PackJob]
    """The jobs, in order."""
    room: Tensor
    """Matrix of the first job's columns in the ring."""
    end: int
    """Byte behind the last job's columns."""

    def takes(self, job: PackJob, at: int) -> bool:
        """Whether a job whose slot begins at a byte goes on where this run ends."""
        last = self.jobs[-1]
        return (
            at == self.end
            and job.grad is last.grad
            and job.move is last.move
            and job.columns.first_row == last.columns.last_row
        )


class GradientRing:
    """Packs columns into bounded device memory, in order; each slot is held until it was sent."""

    def __init__(
        self, device: AbstractDevice, sizes: Iterable[tuple[int, int]], *, wait_timeout: float
    ) -> None:
        """Allocate the ring for matrices of (deferred columns, bytes of a column) each."""
        self._device = device
        self._wait_timeout = wait_timeout
        num_bytes = ring_bytes(sizes)
        self.num_bytes = num_bytes
        """Bytes of device memory."""
        self._memory = ByteMemory(
            torch.empty(num_bytes, dtype=torch.uint8, device=device.torch_device)
        )
        self._next = 0
        self._taken: deque[tuple[int, int, Lease]] = deque()

    def pieces(self, jobs: list[PackJob]) -> Iterator[list[PackJob]]:
        """Yield whole jobs in pieces of at most a third of the ring; large jobs are cut."""
        most = self.num_bytes // PIECES
        piece: list[PackJob] = []
        filled = 0
        for job in jobs:
            for part in self._cut(job, most):
                size = part.slot_bytes
                if piece and filled + size > most:
                    yield piece
                    piece, filled = [], 0
                piece.append(part)
                filled += size
        if piece:
            yield piece

    @staticmethod
    def _cut(job: PackJob, most: int) -> Iterable[PackJob]:
        """Return a whole job, or its parts of at most so many bytes where it has more."""
        if job.slot_bytes <= most:
            return (job,)
        share = max(1, most // aligned(job.block.split.slot_width * job.host.itemsize))
        cuts = range(0, job.high, share)
        return (job.part(low, min(low + share, job.high)) for low in cuts)

    def pack(
        self,
        piece: list[PackJob],
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> tuple[list[tuple[Tensor, Tensor]], Lease]:
        """Pack a piece on the compute stream, into a slot that is held until all have read it.

        Args:
            piece: One of `pieces`.
            waiting: Encloses a wait for a slot.

        Returns:
            (packed columns, host's buffer) of each job, and the slot's lease, which readers take.
            The packing itself is ordered by the compute stream.
        """
        first = self._free_slot(sum(map(_slot_bytes, piece)), waiting)
        packed: list[tuple[Tensor, Tensor]] = []
        runs: list[_Run] = []
        at = first
        for job in piece:
            room = self._room(at, job, job.high - job.low)
            packed.append((room, job.host))
            if runs and runs[-1].takes(job, at):
                runs[-1].jobs.append(job)
                runs[-1].end += job.num_bytes
            else:
                runs.append(_Run(at, [job], room, at + job.num_bytes))
            at += job.slot_bytes
        for run in runs:
            self._launch(run)
        self._next = at
        slot = Lease()
        self._taken.append((first, at, slot))
        return packed, slot

    def _room(self, at: int, job: PackJob, num_rows: int) -> Tensor:
        """Return the matrix of so many of a job's columns that begins at a byte of the ring."""
        return self._memory.matrix(at, (num_rows, job.block.split.gradient_width), job.host.dtype)

    def _launch(self, run: _Run) -> None:
        """Pack a run by one kernel."""
        job, last = run.jobs[0], run.jobs[-1]
        split, columns, room = job.block.split, job.columns, run.room
        if job is not last:
            columns = split.host_columns(columns.first_row, last.columns.last_row)
            room = self._room(run.first, job, len(columns))
        weight = None if job.move is None else split.weight()
        self._device.kernels.pack(job.grad, columns, room, weight, job.move)

    def restart(self) -> None:
        """Go on at the ring's beginning, since the next piece is the first of a step.

        Steps that bring the same gradients in the same order find the same slot for each.
        """
        self._next = self.num_bytes

    def _free_slot(
        self, num_bytes: int, waiting: Callable[[], AbstractContextManager[None]]
    ) -> int:
        """Return the first byte of a free slot; the compute stream waits for its last readers."""
        wraps = self._next + num_bytes > self.num_bytes
        first = 0 if wraps else self._next
        last = first + num_bytes
        while self._taken:
            # The oldest is the next in the circle, but for those that a wrap passes over.
            near = self._taken if wraps else (self._taken[0],)
            if not any(low < last and first < high for low, high, _ in near):
                break
            # The host has seen the end of all others, before what it launches from now on.
            for reader in self._taken.popleft()[2].users:
                with waiting():
                    reader.wait_launched(self._wait_timeout)
                    self._device.order_after(reader)
        return first
