"""Float32 host state: AdamW's weights and moments of some rows as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(slots=True, eq=False)
class FloatState:
    """Rows of AdamW's state in torch's names: (R, O), float32 each."""

    NAMES: ClassVar = ("master", "exp_avg", "exp_avg_sq")
    """Names of the tensors in a checkpoint, in the order of the fields."""
    NUM_WEIGHTS: ClassVar = 1
    """Number of the first tensors which have the weights."""
    DTYPES: ClassVar = (torch.float32,) * 3
    """Type of each tensor."""
    HAS_SECOND: ClassVar = True
    """Whether there are second moments: else their tensors have no columns."""

    master: Tensor
    """True weights of the columns."""
    exp_avg: Tensor
    """AdamW's first moments of the columns."""
    exp_avg_sq: Tensor
    """AdamW's second moments of the columns."""

    @classmethod
    def widths(cls, num_elements: int) -> tuple[int, ...]:
        """Return the length of a row of each tensor, for rows of so many elements."""
        return num_elements, num_elements, num_elements * cls.HAS_SECOND

    def rows(self, part: slice | Tensor) -> FloatState:
        """Return the views of a slice of the rows, or copies of the rows of some indices."""
        return type(self)(self.master[part], self.exp_avg[part], self.exp_avg_sq[part])

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return all tensors, in the order of the fields."""
        return self.master, self.exp_avg, self.exp_avg_sq

    def weights(self) -> Tensor:
        """Return the weights, (R, O): the live tensor."""
        return self.master

    def numbers(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return weights and moments: the live tensors."""
        return self.tensors()

    def copy_rows(self, rows: Tensor, numbers: Sequence[Tensor]) -> None:
        """Write weights and moments of the rows of some indices to outputs, float32 (n, O)."""
        for tensor, values in zip(self.tensors(), numbers, strict=True):
            torch.index_select(tensor, 0, rows, out=values)

    def put(self, rows: Tensor, master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
        """Write weights and moments, float32 (n, O), to the rows of some indices."""
        for tensor, values in zip(self.tensors(), (master, exp_avg, exp_avg_sq), strict=True):
            tensor[rows] = values

    def set_weights(self, weights: Tensor) -> None:
        """Take over weights, (R, O) in any dtype."""
        self.master.copy_(weights)

    def set_moments(self, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
        """Take over moments, float32 (R, O)."""
        self.exp_avg.copy_(exp_avg)
        self.exp_avg_sq.copy_(exp_avg_sq)


class FactoredFloatState(FloatState):
    """Float32 host state without second moments."""

    __slots__ = ()
    HAS_SECOND: ClassVar = False
