"""Factors of a fresh step: the numbers that a gradient's columns and rows are multiplied by.

`zenflow.step.fresh.steps` has the formulas and says when each part of them is computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from zenflow.columns.layout import ColumnVectors, RowVectors, SplitParam
from zenflow.rule.adamw import Hyper

LEAST_ROOT = 1e-15
"""Least root of a second moment, for eps = 0: a row without any gradient is not divided by 0."""


class ColumnTerms(NamedTuple):
    """Numbers of every column in one step, float32: the rows of one matrix, in this order."""

    energy_gain: Tensor
    """Factor on the column's energy in its second moment: (1 - beta2) c^2 / O."""
    share: Tensor
    """The rule's `share`, times the clip factor; 0 for an important column."""
    decay: Tensor
    """Decay of the second moment, beta2."""
    floor: Tensor
    """Addend of the second moment, eps^2 (1 - beta2^t)."""
    stays: Tensor
    """0 for a column whose update lands in this step, else 1."""


class RowTerms(NamedTuple):
    """Numbers of every row in one step, float32: the rows of one matrix, in this order."""

    energy_gain: Tensor
    """Factor on the row's energy in its second moment: (1 - beta2) c^2 / I."""
    decay: Tensor
    """Decay of the second moment, beta2."""
    floor: Tensor
    """Addend of the second moment, eps^2 (1 - beta2^t)."""


@dataclass(frozen=True, slots=True)
class FreshVectors:
    """Vectors over the columns and the rows of neighbouring parameters."""

    columns: ColumnVectors
    """Energies, second moments and fresh factors of the columns."""
    column_gains: Tensor
    """`ColumnTerms.energy_gain` of these columns."""
    shares: Tensor
    """`ColumnTerms.share` of these columns."""
    rows: RowVectors
    """Energies, second moments and fresh factors of the rows."""
    row_gains: Tensor
    """`RowTerms.energy_gain` of these rows."""


def scalars_of(
    hyper: Hyper, count: int, inverse_scale: float
) -> tuple[float, float, tuple[float, float]]:
    """Return the factors of a parameter's step number `count`, its own count of steps.

    Returns:
        Rate of the fresh step, gain of an energy, and decay and floor of second moments.
    """
    root = math.sqrt(1.0 - hyper.beta2**count)
    rate = hyper.lr * root * inverse_scale
    gain = (1.0 - hyper.beta2) * inverse_scale**2
    return rate, gain, (hyper.beta2, max(hyper.eps * root, LEAST_ROOT) ** 2)


def make_factors(part: FreshVectors, moving: Sequence[SplitParam]) -> None:
    """Turn second moments, in place, into the factors of the fresh step.

    Every operation is elementwise, but for each parameter's own mean. So parameters may be
    computed together or apart: no bit depends on that.
    """
    rows, columns = part.rows, part.columns
    # The fresh factors are second moments here, but for this step's part.
    rows.fresh_factors.addcmul_(rows.energies, part.row_gains)
    rows.fresh_factors.rsqrt_()
    columns.fresh_factors.addcmul_(columns.energies, part.column_gains)
    of_rows = [split.rows.fresh_factors for split in moving]
    roots = [split.columns.fresh_factors.mean() for split in moving]
    columns.fresh_factors.rsqrt_().mul_(part.shares)
    if len(roots) == 1:
        of_rows[0].mul_(roots[0].sqrt_())
    else:  # one call for all, which come one after another on any device
        torch._foreach_sqrt_(roots)
        torch._foreach_mul_(of_rows, roots)
