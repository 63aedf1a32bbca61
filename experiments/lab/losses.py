"""Losses of a run beside those of another."""

from __future__ import annotations

from collections.abc import Sequence

LAST_STEPS = 8
"""Number of steps whose losses are compared."""


def excess(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return by what share our loss is above theirs, over the last steps that both have.

    Args:
        ours: Loss of each step, from the first.
        theirs: Those of the run that it is compared with.
    """
    end = min(len(ours), len(theirs))
    our_sum, their_sum = (sum(losses[:end][-LAST_STEPS:]) for losses in (ours, theirs))
    return our_sum / their_sum - 1
