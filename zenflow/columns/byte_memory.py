"""Memory in bytes, cut into matrices of any dtype."""

from __future__ import annotations

import torch
from torch import Tensor


class ByteMemory:
    """A vector of bytes, and matrices that lie in it."""

    def __init__(self, data: Tensor) -> None:
        """Take the bytes, shape (n,), uint8."""
        self.data = data
        self.num_bytes = data.numel()
        self._typed: dict[torch.dtype, Tensor] = {}

    def matrix(self, first: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Return the contiguous matrix that begins at a byte, a multiple of the dtype's size.

        Every torch operation gives the interpreter away for a moment, so this is only one.
        """
        typed = self._typed.get(dtype)
        if typed is None:
            whole = self.num_bytes // dtype.itemsize * dtype.itemsize
            typed = self._typed[dtype] = self.data[:whole].view(dtype)
        return typed.as_strided(shape, (shape[1], 1), first // dtype.itemsize)
