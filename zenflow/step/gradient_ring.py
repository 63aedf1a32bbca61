"""The ring through which released gradients leave a GPU: bounded memory, used in a circle.

The deferred columns of a gradient are packed into it on the compute stream, at the moment at
which backward has finished the gradient. The gradient's memory is then free, whoever owns it.
The d2h lane sends what lies in the ring. Where the link is late, the ring is full, and the compute
stream waits for room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from zenflow.device.base import AbstractDevice
from zenflow.lanes.completion import Completion
from zenflow.step.ring_size import PIECES, aligned, ring_bytes

PackJob = tuple[Tensor, Tensor, Tensor]
"""Gradient (O, I), column indices (D,), and the host's buffer (D, O)."""


class GradientRing:
    """Packs columns into bounded device memory, in order; each piece stays until it was sent."""

    def __init__(
        self, device: AbstractDevice, buffers: Iterable[Tensor], *, wait_timeout: float
    ) -> None:
        """Allocate memory for host buffers (D, O) of which each is filled once a step."""
        self._device = device
        self._wait_timeout = wait_timeout
        num_bytes = ring_bytes((len(buffer), buffer[:1].nbytes) for buffer in buffers)
        self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=device.torch_device)
        self._typed: dict[torch.dtype, Tensor] = {}
        self._next = 0
        self._taken: deque[tuple[int, int, Completion]] = deque()

    @property
    def num_bytes(self) -> int:
        """Bytes of device memory."""
        return self._memory.numel()

    def pieces(self, jobs: list[PackJob]) -> Iterator[list[PackJob]]:
        """Yield the jobs in pieces of at most a quarter of the ring; large jobs are cut."""
        most = self.num_bytes // PIECES
        piece: list[PackJob] = []
        filled = 0
        for grad_OI, columns_D, host_DO in jobs:
            count = len(host_DO)
            share = max(1, most // aligned(host_DO[:1].nbytes))
            for low in range(0, count, share):
                part = slice(low, low + share)
                size = aligned(host_DO[part].nbytes)
                if piece and filled + size > most:
                    yield piece
                    piece, filled = [], 0
                piece.append((grad_OI, columns_D[part], host_DO[part]))
                filled += size
        if piece:
            yield piece

    def pack(
        self,
        piece: list[PackJob],
        sent: Completion,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> list[tuple[Tensor, Tensor]]:
        """Pack a piece on the compute stream.

        Args:
            piece: One of `pieces`.
            sent: The copy that is going to send it; the room is its own until then.
            waiting: Encloses a wait for room.

        Returns:
            (packed columns (D, O), host's buffer (D, O)) of each job.
        """
        first = self._make_room(sum(aligned(host.nbytes) for _, _, host in piece), waiting)
        packed = []
        at = first
        for grad_OI, columns_D, host_DO in piece:
            room = self._room(at, host_DO)
            torch.index_select(grad_OI.t(), 0, columns_D, out=room)
            packed.append((room, host_DO))
            at += aligned(host_DO.nbytes)
        self._next = at
        self._taken.append((first, at, sent))
        return packed

    def _room(self, at: int, like: Tensor) -> Tensor:
        """Return a contiguous matrix at this byte, of another one's shape and dtype.

        Every torch operation gives the interpreter away for a moment, so this is only one.
        """
        typed = self._typed.get(like.dtype)
        if typed is None:
            typed = self._typed[like.dtype] = self._memory.view(like.dtype)
        count, height = like.shape
        return typed.as_strided((count, height), (height, 1), at // like.dtype.itemsize)

    def _make_room(
        self, num_bytes: int, waiting: Callable[[], AbstractContextManager[None]]
    ) -> int:
        """Return where the next bytes go; the compute stream waits for what was there."""
        first = self._next if self._next + num_bytes <= self.num_bytes else 0
        last = first + num_bytes
        while any(low < last and first < high for low, high, _ in self._taken):
            sent = self._taken.popleft()[2]
            # Else the host has seen its end, before what it launches from now on.
            if not sent.has_succeeded:
                with waiting():
                    sent.wait_launched(self._wait_timeout)
                    self._device.order_after(sent)
        return first
