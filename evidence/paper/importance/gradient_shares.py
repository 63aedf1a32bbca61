"""Gradient shares: arithmetic on squared column norms.

Shapes: P split matrices, each (O, I); a column is one of the I input channels. All shares are of
the squared norm over all matrices; the best columns are the best of each matrix, as the engine
selects them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Norms = Sequence[NDArray[np.float64]]
"""Squared norms of one step's columns: (I,) of each matrix."""
Masks = Sequence[NDArray[np.bool_]]
SHARES = (0.01, 0.05, 0.1)


def column_norms(gradients: Sequence[Tensor]) -> list[NDArray[np.float64]]:
    """Return the squared norm of each column of each gradient (O, I)."""
    return [g.double().square().sum(dim=0).numpy() for g in gradients]


def best(norms: Norms, share: float) -> list[NDArray[np.bool_]]:
    """Return the mask of each matrix's best max(1, round(share I)) columns."""
    masks = []
    for own in norms:
        mask = np.zeros(len(own), dtype=bool)
        mask[np.argsort(-own, kind="stable")[: max(1, round(share * len(own)))]] = True
        masks.append(mask)
    return masks


def kept(norms: Norms, masks: Masks) -> float:
    """Return the share of a step's squared norm that lies in chosen columns."""
    total = sum(float(own.sum()) for own in norms)
    chosen = sum(float(own[mask].sum()) for own, mask in zip(norms, masks, strict=True))
    return chosen / total if total else float("nan")


def top_columns(norms: Norms) -> dict[str, float]:
    """Return by share of columns what the best ones of a step hold."""
    return {f"{share:g}": kept(norms, best(norms, share)) for share in SHARES}


def top_entries(gradients: Sequence[Tensor]) -> dict[str, float]:
    """Return by share of entries what the largest ones hold, over all matrices together."""
    squares = torch.cat([g.flatten().double().square() for g in gradients]).sort(descending=True)
    sums = squares.values.cumsum(0)
    last = len(sums) - 1
    places = {share: min(last, max(1, round(share * len(sums))) - 1) for share in SHARES}
    return {f"{share:g}": float(sums[place] / sums[last]) for share, place in places.items()}


def largest_by_column(gradients: Sequence[Tensor], share: float) -> list[NDArray[np.int64]]:
    """Return how many of each matrix's largest entries lie in each of its columns."""
    counts = []
    for gradient in gradients:
        size = max(1, round(share * gradient.numel()))
        places = gradient.abs().flatten().topk(size).indices % gradient.shape[1]
        counts.append(torch.bincount(places, minlength=gradient.shape[1]).numpy())
    return counts


def covered(counts: Sequence[NDArray[np.int64]], masks: Masks) -> float:
    """Return the share of the counted entries that lie in chosen columns."""
    inside = sum(int(own[mask].sum()) for own, mask in zip(counts, masks, strict=True))
    return inside / sum(int(own.sum()) for own in counts)


def persistence(
    history: Mapping[int, Norms], starts: Sequence[int], shifts: Sequence[int], share: float
) -> dict[str, float]:
    """Return by steps later the energy kept in columns chosen then, over what is best by then.

    1 is as good as choosing anew; a mean over the starts.

    Args:
        history: Norms by step.
        starts: Steps at which columns are chosen.
        shifts: Steps later; what lies behind the history is left out.
        share: Of the columns.
    """
    found = {}
    for shift in shifts:
        ratios = [
            kept(history[at + shift], best(history[at], share))
            / kept(history[at + shift], best(history[at + shift], share))
            for at in starts
            if at in history and at + shift in history
        ]
        if ratios:
            found[str(shift)] = float(np.mean(ratios))
    return found


def averaged(history: Sequence[Norms], decay: float) -> list[NDArray[np.float64]]:
    """Return the moving average of norms, as the engine scores columns."""
    scores = [np.zeros_like(own) for own in history[0]]
    for norms in history:
        scores = [decay * s + (1 - decay) * own for s, own in zip(scores, norms, strict=True)]
    return scores
