"""Scores of a test of two classes."""

from __future__ import annotations

import math
from collections.abc import Sequence


def accuracy(predicted: Sequence[int], labels: Sequence[int]) -> float:
    """Return the share of labels that were told."""
    return sum(mine == label for mine, label in zip(predicted, labels, strict=True)) / len(labels)


def matthews(predicted: Sequence[int], labels: Sequence[int]) -> float:
    """Return Matthews' correlation of 0s and 1s; 0 where either has one value only.

    Matthews, "Comparison of the predicted and observed secondary structure of T4 phage lysozyme",
    1975: Pearson's correlation of two binary variables.
    """
    count, ours, theirs = len(labels), sum(predicted), sum(labels)
    both = sum(mine * label for mine, label in zip(predicted, labels, strict=True))
    spread = ours * (count - ours) * theirs * (count - theirs)
    return (count * both - ours * theirs) / math.sqrt(spread) if spread else 0.0
