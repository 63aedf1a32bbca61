"""Important columns of many matrices as one kernel finds them: rows of a table, and addresses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from zenflow.device.kernels.base import ColumnStep
from zenflow.device.kernels.triton_launches import ALIGNMENT
from zenflow.rule.adamw import Hyper


class Kind(NamedTuple):
    """Properties that the columns of one launch have in common."""

    hyper: Hyper
    """Settings of the step."""
    dtype: torch.dtype
    """Type of gradients and weights."""
    is_wide: bool
    """Whether every column of gradient and state begins at a multiple of 16 bytes."""
    has_second: bool
    """Whether the columns have second moments."""

    @classmethod
    def of(cls, step: ColumnStep) -> Kind:
        """Return the properties of columns of one length."""
        gradients = [member.gradient for member in step.members]
        is_wide = step.state.master.shape[1] % ALIGNMENT == 0
        is_wide = is_wide and not any(gradient.data_ptr() % ALIGNMENT for gradient in gradients)
        has_second = step.state.exp_avg_sq.shape == step.state.master.shape
        return cls(step.hyper, gradients[0].dtype, is_wide, has_second)


class ColumnRun:
    """Columns of one kind, one matrix after another.

    Attributes:
        rows: Number of columns, their length, place of the first one in the vectors of factors,
            and the weight's strides, for each matrix.
        addresses: Addresses of gradient, master, both moments, columns' indices and weight, for
            each matrix; 0 for a weight that is not here.
        programs: Number of tiles of each matrix.
    """

    def __init__(self, tile: dict[str, int]) -> None:
        """Begin with no matrix; tiles are of ROWS x COLUMNS elements."""
        self._tile = tile
        self.rows: list[tuple[int, ...]] = []
        self.addresses: list[int] = []
        self.programs: list[int] = []

    def add(self, step: ColumnStep, first: int) -> None:
        """Add matrices.

        Args:
            step: The matrices' columns.
            first: Place of their first one in the vectors of factors.
        """
        state = step.state
        num_rows = state.master.shape[1]
        down = -(-num_rows // self._tile["ROWS"])
        of_state = [t.data_ptr() for t in (state.master, state.exp_avg, state.exp_avg_sq)]
        column_bytes = num_rows * state.master.itemsize
        for member in step.members:
            count, weight = member.columns.numel(), member.weight
            strides = (0, 0) if weight is None else weight.stride()
            self.rows.append((count, num_rows, first, *strides))
            self.addresses += (member.gradient.data_ptr(), *of_state, member.columns.data_ptr())
            self.addresses.append(0 if weight is None else weight.data_ptr())
            self.programs.append(-(-count // self._tile["COLUMNS"]) * down)
            of_state = [place + count * column_bytes for place in of_state]
            first += count


def runs_of(steps: Sequence[ColumnStep], tile: dict[str, int]) -> dict[Kind, ColumnRun]:
    """Return the columns by kind; those of equal settings share the vectors of factors."""
    runs: dict[Kind, ColumnRun] = {}
    firsts: Counter[Hyper] = Counter()
    for step in steps:
        runs.setdefault(Kind.of(step), ColumnRun(tile)).add(step, firsts[step.hyper])
        firsts[step.hyper] += step.state.step.numel()
    return runs
