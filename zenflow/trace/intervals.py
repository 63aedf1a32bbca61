"""Sets of time as lists of intervals: union, intersection, difference, length.

Except for ``merge``, which makes one, every list here is *merged*: ascending, disjoint pairs
(start, end). Each function is one pass.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

Interval = tuple[float, float]


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of any intervals.

    >>> merge([(4, 5), (0, 2), (1, 3)])
    [(0, 3), (4, 5)]
    """
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def intersect(left: list[Interval], right: list[Interval]) -> list[Interval]:
    """Return the intersection of two sets.

    >>> intersect([(0, 3), (4, 5)], [(2, 9)])
    [(2, 3), (4, 5)]
    """
    shared, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            shared.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return shared


def subtract(left: list[Interval], right: list[Interval]) -> list[Interval]:
    """Return the difference of two sets: ``left`` without ``right``.

    >>> subtract([(0, 9)], [(1, 2), (8, 12)])
    [(0, 1), (2, 8)]
    """
    gap_starts = [-math.inf, *(end for _, end in right)]
    gap_ends = [*(start for start, _ in right), math.inf]
    return intersect(left, list(zip(gap_starts, gap_ends, strict=True)))


def length(merged: list[Interval]) -> float:
    """Return the total length of a set."""
    return math.fsum(end - start for start, end in merged)
