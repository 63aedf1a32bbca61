"""Addresses of the columns that one kernel steps, as numbers in the device's memory.

Gradients lie elsewhere in each step, and parameters without one are left out. So the numbers are
made in every step; they are copied where they are others than before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zenflow.device.kernels.base import ColumnStep
from zenflow.rule.adamw import Hyper

_LEAST_MATRICES = 64
"""Matrices that a table has room for at least: a kernel is compiled for each power of two."""
_NO_TILE = 2**62
"""Stands for the first tile of a matrix that is not there."""
WIDEST = 16
"""Bytes of the widest access; a multiple of as many elements keeps its alignment."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Properties that the columns of one launch have in common."""

    hyper: Hyper
    """Settings of the step."""
    dtype: torch.dtype
    """Type of gradients and weights."""
    is_wide: bool
    """Whether every column of gradient and state begins at a multiple of 16 bytes."""

    @classmethod
    def of(cls, step: ColumnStep) -> Kind:
        """Return the properties of columns of one length."""
        gradients = [member.gradient for member in step.members]
        is_wide = step.state.master.shape[1] % WIDEST == 0
        is_wide = is_wide and not any(gradient.data_ptr() % WIDEST for gradient in gradients)
        return cls(step.hyper, gradients[0].dtype, is_wide)


class ColumnRun:
    """Columns of one kind as the kernel finds them: tile by tile, one matrix after another.

    Attributes:
        num_tiles: Tiles of all matrices so far.
    """

    def __init__(self, tile: dict[str, int]) -> None:
        """Begin with no matrix; tiles are of ROWS x COLUMNS elements."""
        self._tile = tile
        self._first_tiles: list[int] = []
        self._of_matrices: list[int] = []
        self.num_tiles = 0

    @property
    def num_matrices(self) -> int:
        """Number of matrices that the table has room for, a power of two."""
        return max(_LEAST_MATRICES, 1 << (len(self._first_tiles) - 1).bit_length())

    @property
    def numbers(self) -> list[int]:
        """Table of the kernel `adamw`."""
        absent = [_NO_TILE] * (self.num_matrices - len(self._first_tiles))
        return [*self._first_tiles, *absent, *self._of_matrices]

    def add(self, step: ColumnStep, first: int) -> None:
        """Add matrices, in the order in which the kernel reads their numbers.

        Args:
            step: The matrices' columns.
            first: Place of their first one in the vectors of factors.
        """
        state = step.state
        num_rows = state.master.shape[1]
        down = -(-num_rows // self._tile["ROWS"])
        addresses = [t.data_ptr() for t in (state.master, state.exp_avg, state.exp_avg_sq)]
        column_bytes = num_rows * state.master.itemsize
        for member in step.members:
            count, weight = member.columns.numel(), member.weight
            self._first_tiles.append(self.num_tiles)
            self._of_matrices += (count, num_rows, member.gradient.data_ptr(), *addresses, first)
            self._of_matrices += (
                (0, 0, 0, 0)
                if weight is None
                else (weight.data_ptr(), member.columns.data_ptr(), *weight.stride())
            )
            self.num_tiles += -(-count // self._tile["COLUMNS"]) * down
            addresses = [address + count * column_bytes for address in addresses]
            first += count


def runs_of(steps: Sequence[ColumnStep], tile: dict[str, int]) -> dict[Kind, ColumnRun]:
    """Return the columns by kind; those of equal settings share the vectors of factors."""
    runs: dict[Kind, ColumnRun] = {}
    firsts: Counter[Hyper] = Counter()
    for step in steps:
        runs.setdefault(Kind.of(step), ColumnRun(tile)).add(step, firsts[step.hyper])
        firsts[step.hyper] += step.state.step.numel()
    return runs


class DeviceNumbers:
    """Whole numbers in the device's memory, for kernels of one stream."""

    def __init__(self, device: torch.device) -> None:
        """Begin with none."""
        self._device = device
        self._numbers: list[int] = []
        self._there = torch.empty(0, dtype=torch.int64, device=device)

    def put(self, parts: Sequence[list[int]]) -> Sequence[Tensor]:
        """Return the numbers on the device, int64, by part.

        Nothing waits for the copy. Where all numbers are as they were, none takes place.
        """
        numbers = [number for part in parts for number in part]
        if numbers != self._numbers:
            is_pinned = self._device.type == "cuda"
            host = torch.tensor(numbers, dtype=torch.int64, device="cpu", pin_memory=is_pinned)
            there = torch.empty(len(numbers), dtype=torch.int64, device=self._device)
            self._there = there.copy_(host, non_blocking=True)
            self._numbers = numbers
        sizes = [len(part) for part in parts]
        return list(self._there.split(sizes))
