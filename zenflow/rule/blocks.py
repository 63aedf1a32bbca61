"""Blocks: the runs of columns that share a window. Pure arithmetic.

A split parameter is viewed as a matrix of O rows and I columns. Its columns are cut into blocks so
that no block is a large part of one step's host work; a block is the unit of window, selection,
update, upload and landing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

BLOCKS_PER_STEP = 8
"""Number of largest blocks in one step's part of the host work. More and smaller blocks would even
the load out further, but each costs some bookkeeping."""

FULL_STEP = 1.02
"""Largest load of a step, over the mean load, that is accepted for fewer and larger tasks."""

MIN_AUTOMATIC_COLUMNS = 64
"""Least number of columns in a block. With fewer, rounding to whole ones distorts the traffic."""

MIN_AUTOMATIC_ELEMENTS = 1 << 15
"""Least number of elements in a block. Updating fewer takes less than a block's bookkeeping."""

MAX_BUCKET_ELEMENTS = 1 << 25
"""Number of elements at which a bucket is full. A bucket costs the thread that launches backward
some hundred microseconds at any size. A gradient's memory stays until its bucket is full."""

MAX_COHORT_ELEMENTS = 1 << 18
"""Number of elements at which a cohort of small parameters is full. A host task and an upload cost
tens of microseconds at any size; for larger parameters an even load is worth more than that."""

LEAST_FULL = 1 << 14
"""Least number of elements at which a bucket or a cohort is full."""
BUCKETS_AT_LEAST = 32
"""Number of buckets of a small model, so that copies overlap backward there too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """The place of one block: a run of columns of one split parameter."""

    matrix: int
    """Index of the split parameter, in registration order."""
    first: int
    """First column of the run."""
    num_columns: int
    """Number of columns in the run."""
    num_rows: int
    """Length of a whole column, over all ranks that have rows of it."""
    bucket: int
    """Index, in backward order, of the bucket that its parameter is copied in."""
    cohort: int
    """Index, in backward order, of the block's cohort: small parameters whose blocks end their
    windows together where the load allows."""
    num_important: int
    """Number of columns that the device owns, which the ratio alone decides."""
    num_deferred: int = field(init=False)
    """Number of columns that the host owns. A field: every step asks each block several times."""

    def __post_init__(self) -> None:
        """Count the deferred columns."""
        object.__setattr__(self, "num_deferred", self.num_columns - self.num_important)

    @property
    def deferred_elements(self) -> int:
        """Number of host-owned elements: the block's load in the step in which its window ends."""
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
    pages: Sequence[int] | None = None,
) -> list[BlockShape]:
    """Cut matrices into blocks, last matrix first: the order in which backward finishes them.

    Args:
        shapes: (O, I) of each split parameter, in registration order.
        topk_ratio: Fraction k of each block's columns that is important.
        update_interval: S, the number of steps that the blocks are divided over.
        block_elements: Largest number of elements in a block; None for total / (8 S), with at
            least 64 columns and 2^15 elements a block.
        pages: Page of each matrix, or another number for one that stays on the device: a bucket
            has matrices of one page. None where all stay.
    """
    total = sum(rows * columns for rows, columns in shapes)
    cap = block_elements or max(1, math.ceil(total / (BLOCKS_PER_STEP * update_interval)))
    sizes = [rows * columns for rows, columns in shapes]
    buckets = filled_in_order(sizes, MAX_BUCKET_ELEMENTS, pages)
    cohorts = filled_in_order(sizes, MAX_COHORT_ELEMENTS)
    blocks = []
    for matrix in reversed(range(len(shapes))):
        rows, columns = shapes[matrix]
        count = min(max(1, math.ceil(rows * columns / cap)), columns)
        if block_elements is None:
            most = min(columns // MIN_AUTOMATIC_COLUMNS, rows * columns // MIN_AUTOMATIC_ELEMENTS)
            count = min(count, max(1, most))
        first = 0
        for index in range(count):
            width = columns // count + (index < columns % count)
            blocks.append(
                BlockShape(
                    matrix=matrix,
                    first=first,
                    num_columns=width,
                    num_rows=rows,
                    bucket=buckets[matrix],
                    cohort=cohorts[matrix],
                    num_important=important_count(topk_ratio, width),
                )
            )
            first += width
    return blocks


def filled_in_order(
    sizes: Sequence[int], most: int, pages: Sequence[int] | None = None
) -> list[int]:
    """Return each matrix's bucket or cohort, numbered in backward order.

    Neighbours join a bucket until it has `most` elements, or a 32nd of a smaller model.

    Args:
        sizes: Elements of each split parameter, in registration order.
        most: Number of elements at which a bucket is full in any model.
        pages: A number for each matrix; only neighbours with one number join.

    >>> filled_in_order([1 << 14, 1 << 13, 1 << 13], 1 << 18)
    [1, 0, 0]
    """
    enough = min(most, max(LEAST_FULL, sum(sizes) // BUCKETS_AT_LEAST))
    places: list[int] = []
    place, filled, last = -1, enough, None
    for size, page in zip(reversed(sizes), reversed(pages or [0] * len(sizes)), strict=True):
        if filled >= enough or page != last:
            place += 1
            filled, last = 0, page
        places.append(place)
        filled += size
    return places[::-1]


def assign_phases(loads: Sequence[int], cohorts: Sequence[int], interval: int) -> list[int]:
    """Return each block's phase in 1..interval, so that every step's load is about the same.

    Blocks are taken in order, and each goes to the phase with the least load, the first one on a
    tie. So the blocks due at one step are also spread over backward. Blocks of a small cohort go
    together, for one host task and one upload in place of several. Where a cohort would bring a
    step's load above `FULL_STEP` of the mean, its blocks go one by one, after all others, largest
    first.

    Args:
        loads: Deferred elements of each block, in backward order.
        cohorts: Cohort of each block; one cohort's blocks are neighbours.
        interval: S.

    >>> assign_phases([4, 4, 4, 4, 2, 2], [0, 1, 2, 3, 4, 5], 3)
    [1, 2, 3, 3, 1, 2]
    >>> assign_phases([2, 2, 2, 2, 2, 2], [0, 0, 1, 1, 2, 2], 2)
    [1, 1, 2, 2, 1, 2]
    """
    full = FULL_STEP * sum(loads) / interval
    filled = [0] * interval
    phases = [0] * len(loads)

    def place(run: Sequence[int], load: int) -> None:
        phase = min(range(interval), key=filled.__getitem__)
        filled[phase] += load
        for block in run:
            phases[block] = phase + 1

    left: list[int] = []
    for _, neighbours in groupby(range(len(loads)), key=cohorts.__getitem__):
        run = list(neighbours)
        load = sum(loads[block] for block in run)
        if load > MAX_COHORT_ELEMENTS:
            for block in run:
                place([block], loads[block])
        elif min(filled) + load <= full:
            place(run, load)
        else:
            left += run
    for block in sorted(left, key=loads.__getitem__, reverse=True):
        place([block], loads[block])
    return phases
