"""Which columns are important: pure functions of the columns' scores."""

from __future__ import annotations

import torch
from torch import Tensor


def select_columns(scores: Tensor, is_important: Tensor, count: int, hysteresis: float) -> Tensor:
    """Return the mask, shape (n,), of the `count` columns with the highest scores.

    An important column's score counts (1 + hysteresis) times, so that near-ties do not make
    columns change owner again and again. Equal scores: the lower column index wins.

    Args:
        scores: Moving averages of squared column norms, shape (n,), float32.
        is_important: Who owns each column now, shape (n,), bool.
        count: How many columns to select, at most n.
        hysteresis: Share by which a newcomer must exceed the column it replaces.
    """
    weighted = torch.where(is_important, scores * (1.0 + hysteresis), scores)
    order = torch.argsort(weighted, descending=True, stable=True)
    mask = torch.zeros_like(is_important)
    mask[order[:count]] = True
    return mask
