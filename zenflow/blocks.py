"""Blocks: the runs of columns that share a window. Pure arithmetic, no torch.

A split parameter is viewed as a matrix of O rows and I columns. Its columns are cut into blocks so
that no block is a large part of one step's host work; a block is the unit of window, selection,
update, upload and landing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

BLOCKS_PER_STEP = 8
"""How many blocks of the largest size fit one step's share of the host work. More would even the
load out further; each block costs some bookkeeping."""

MIN_AUTOMATIC_COLUMNS = 64
"""With fewer columns, rounding `topk_ratio * columns` to whole columns distorts the traffic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """The place of one block: a run of columns of one split parameter."""

    matrix: int
    """Index of the split parameter, in registration order."""
    first: int
    """First column of the run."""
    num_columns: int
    num_rows: int
    """Length O of a column."""
    num_important: int
    """Columns the device owns: by the ratio, at every time."""

    @property
    def num_deferred(self) -> int:
        """Columns the host owns."""
        return self.num_columns - self.num_important

    @property
    def deferred_elements(self) -> int:
        """Host-owned elements: the block's load in a step in which it is due."""
        return self.num_deferred * self.num_rows


def important_count(topk_ratio: float, num_columns: int) -> int:
    """Return how many of a block's columns are important: at least one unless the ratio is 0.

    >>> [important_count(k, 64) for k in (0.0, 0.001, 0.1, 1.0)]
    [0, 1, 6, 64]
    """
    if topk_ratio == 0:
        return 0
    return min(num_columns, max(1, math.floor(topk_ratio * num_columns + 0.5)))


def partition(
    shapes: Sequence[tuple[int, int]],
    *,
    topk_ratio: float,
    update_interval: int,
    block_elements: int | None,
) -> list[BlockShape]:
    """Cut matrices into blocks, last matrix first: the order in which backward finishes them.

    Args:
        shapes: (O, I) of each split parameter, in registration order.
        topk_ratio: Share of each block's columns that is important.
        update_interval: S, which sets a step's fair share of the work.
        block_elements: Largest number of elements in a block; None for the fair share,
            total / (8 S), with at least 64 columns a block.
    """
    total = sum(rows * columns for rows, columns in shapes)
    cap = block_elements or max(1, math.ceil(total / (BLOCKS_PER_STEP * update_interval)))
    blocks = []
    for matrix in reversed(range(len(shapes))):
        rows, columns = shapes[matrix]
        count = min(max(1, math.ceil(rows * columns / cap)), columns)
        if block_elements is None:
            count = min(count, max(1, columns // MIN_AUTOMATIC_COLUMNS))
        first = 0
        for index in range(count):
            width = columns // count + (index < columns % count)
            blocks.append(
                BlockShape(
                    matrix=matrix,
                    first=first,
                    num_columns=width,
                    num_rows=rows,
                    num_important=important_count(topk_ratio, width),
                )
            )
            first += width
    return blocks


def assign_phases(loads: Sequence[int], interval: int) -> list[int]:
    """Return each block's phase in 1..interval, so that every step's load is about the same.

    Blocks are taken in order and each goes to the least loaded phase, the smaller one on a tie, so
    that the blocks due at one step are also spread over backward.

    >>> assign_phases([4, 4, 4, 4, 2, 2], 3)
    [1, 2, 3, 1, 2, 3]
    """
    filled = [0] * interval
    phases = []
    for load in loads:
        phase = min(range(interval), key=filled.__getitem__)
        filled[phase] += load
        phases.append(phase + 1)
    return phases


def initial_important(block: BlockShape) -> list[int]:
    """Return the columns that are important before any gradient is known: evenly spaced ones."""
    count = block.num_important
    return [block.first + (index * block.num_columns) // count for index in range(count)]
