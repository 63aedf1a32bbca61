"""Memory in bytes, cut into matrices of any dtype."""

from __future__ import annotations

import torch
from torch import Tensor

MOST_KNOWN = 1 << 12
"""Largest number of remembered matrices; with one more, all are forgotten."""


class ByteMemory:
    """A vector of bytes, and matrices that lie in it.

    Matrices are remembered: the same ones are asked for at every step or window, and to make one
    costs a torch operation, which gives the interpreter away for a moment. One thread asks.
    """

    def __init__(self, data: Tensor) -> None:
        """Take the bytes, shape (n,), uint8."""
        self.data = data
        self.num_bytes = data.numel()
        self._typed: dict[torch.dtype, Tensor] = {}
        self._known: dict[tuple[int, tuple[int, int], torch.dtype], Tensor] = {}

    def matrix(self, first: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Return the contiguous matrix that begins at a byte, a multiple of the dtype's size."""
        matrix = self._known.get((first, shape, dtype))
        if matrix is None:
            if len(self._known) == MOST_KNOWN:
                self._known.clear()
            matrix = self._made(first, shape, dtype)
            self._known[first, shape, dtype] = matrix
        return matrix

    def _made(self, first: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        typed = self._typed.get(dtype)
        if typed is None:
            whole = self.num_bytes // dtype.itemsize * dtype.itemsize
            typed = self._typed[dtype] = self.data[:whole].view(dtype)
        return typed.as_strided(shape, (shape[1], 1), first // dtype.itemsize)
