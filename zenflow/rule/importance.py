"""Choice of important columns: pure functions of the columns' scores."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zenflow.rule.blocks import important_count

CURVE_RATIOS = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7)
"""Fractions of each block's columns at which an energy curve is read."""


class ScoreCurve:
    """Energy curve: the score of each block's best columns, by their fraction of all columns."""

    def __init__(self, widths: Sequence[int], device: torch.device) -> None:
        """Compute each block's number of best columns at each of `CURVE_RATIOS`.

        Args:
            widths: Number of columns of each block, in the order of the columns.
            device: Device of the scores.
        """
        lengths = torch.tensor(widths, device="cpu")
        numbers = torch.arange(len(widths), device="cpu")
        self._block_of = numbers.repeat_interleave(lengths).to(device)
        firsts = lengths.cumsum(0) - lengths
        ranks = torch.arange(int(lengths.sum()), device="cpu") - firsts.repeat_interleave(lengths)
        by_ratio = [[important_count(k, n) for n in widths] for k in CURVE_RATIOS]
        counts = torch.tensor(by_ratio, device="cpu")
        taken = ranks < counts.repeat_interleave(lengths, dim=1)
        self._last_taken = taken.sum(dim=0).to(device)

    def read(self, scores: Tensor) -> Tensor:
        """Return the total score, then the best columns' at each of `CURVE_RATIOS`; float32."""
        descending = scores.argsort(descending=True, stable=True)
        grouped = descending[self._block_of[descending].argsort(stable=True)]
        ordered = scores[grouped]
        # A column of the first rank is taken at every ratio, one of the last at none.
        sums = [
            torch.where(self._last_taken >= len(CURVE_RATIOS) - index, ordered, 0.0).sum()
            for index in range(len(CURVE_RATIOS))
        ]
        return torch.stack([scores.sum(), *sums])


def energy_curve(values: Sequence[float]) -> dict[float, float] | None:
    """Return fractions of the score by ratio, from `ScoreCurve.read`; None for a score of 0."""
    total, *sums = values
    if not total > 0:
        return None
    return {ratio: min(1.0, part / total) for ratio, part in zip(CURVE_RATIOS, sums, strict=True)}


def select_columns(scores: Tensor, is_important: Tensor, count: int, hysteresis: float) -> Tensor:
    """Return the mask, shape (n,), of the `count` columns with the highest scores.

    An important column's score counts (1 + hysteresis) times, so that near-ties do not make
    columns change owner again and again. Of equal scores the lower column index wins.

    Args:
        scores: Moving averages of squared column norms, shape (n,), float32.
        is_important: Who owns each column now, shape (n,), bool.
        count: Number of columns to select, at most n.
        hysteresis: Fraction by which a newcomer's score must exceed the replaced column's.
    """
    weighted = torch.where(is_important, scores * (1.0 + hysteresis), scores)
    order = torch.argsort(weighted, descending=True, stable=True)
    mask = torch.zeros_like(is_important)
    mask[order[:count]] = True
    return mask
