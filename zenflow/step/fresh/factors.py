"""Terms of a fresh step's factors: numbers of its columns, of its rows, and of its matrices.

`zenflow.step.fresh.steps` has the formulas and says when each part of them is computed.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from zenflow.columns.layout import ColumnVectors, RowVectors
from zenflow.device.kernels.base import SecondMoments
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


def second_moments(
    vectors: ColumnVectors | RowVectors, terms: ColumnTerms | RowTerms, part: slice = slice(None)
) -> SecondMoments:
    """Return second moments of columns or rows.

    Args:
        vectors: Their energies, second moments and factors.
        terms: Terms of all columns or rows.
        part: Part of all that the vectors are.
    """
    return SecondMoments(
        vectors.mean_squares,
        terms.decay[part],
        terms.floor[part],
        vectors.energies,
        terms.energy_gain[part],
        vectors.fresh_factors,
    )


class StepScalars(NamedTuple):
    """Factors of one parameter group's step."""

    rate: float
    """Rate of the fresh step, for gradients as they are."""
    root: float
    """Factor on gradients which are divided by the roots of their second moments."""
    energy_gain: float
    """Factor on an energy in the second moments, without clip factor and length."""
    decay: float
    """Decay of second moments, beta2."""
    floor: float
    """Addend of second moments."""


def scalars_of(hyper: Hyper, count: int, inverse_scale: float) -> StepScalars:
    """Return the factors of a parameter's step number `count`, its own count of steps."""
    root = math.sqrt(1.0 - hyper.beta2**count)
    rate = hyper.lr * root * inverse_scale
    gain = (1.0 - hyper.beta2) * inverse_scale**2
    floor = max(hyper.eps * root, LEAST_ROOT) ** 2
    return StepScalars(rate, root * inverse_scale, gain, hyper.beta2, floor)
