"""Sizes of the engine's memory. Pure arithmetic: the engine allocates, the simulator counts.

This module loads no torch, and is the one place of each size that both need.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

BANK_ELEMENTS = 1 << 24
"""Largest number of elements in a bank of important columns."""
BANK_TEMPORARIES = 3
"""Number of float32 temporaries of a bank's size in its update."""
FRESH_ELEMENTS = 1 << 24
"""Largest number of elements of a matrix that a fresh step moves at once, in a temporary of this
size."""
GATHERED_BYTES = 1 << 26
"""Largest number of bytes of weights in one all-gather; one arrival alone may be larger."""
GATHERED_COPIES = 3
"""Number of copies of whole columns that an all-gather needs: a rank's own rows, all ranks' rows,
and the columns."""

_FLOAT, _INDEX = 4, 8
COLUMN_BYTES = 4 * _FLOAT + 1 + 4 + _INDEX
"""Bytes of a split parameter's column on the device: energy, score, second moment, factor,
ownership, host row, index."""
FRESH_COLUMN_BYTES = _INDEX + 6 * _FLOAT
"""Bytes that fresh steps need for a column."""
FRESH_ROW_BYTES = _INDEX + 7 * _FLOAT
"""Bytes that fresh steps need for a row."""
SAVED_COLUMN_BYTES = 2 * _INDEX + 2 * _FLOAT
"""Bytes of a column in a checkpoint: index, step count, score, second moment."""

# ---- gradients that leave a GPU through a ring -------------------------------------------------

RING_BYTES = 1 << 28
"""Size of a ring in bytes, unless a step's columns are fewer or three columns are more."""
PIECES = 3
"""Number of the largest pieces that fit a ring. Packing goes on while one is on its way."""
ALIGNMENT = 512
"""Number of bytes at whose multiples pieces begin, for accesses of whole memory lines."""


def ring_bytes(matrices: Iterable[tuple[int, int]]) -> int:
    """Return the bytes of a ring for matrices whose deferred columns are sent once a step.

    The ring holds a step's columns up to `RING_BYTES`, and at least three of the longest columns.

    Args:
        matrices: Number of deferred columns, and bytes of one column, of each matrix.

    >>> ring_bytes([(1000, 8192), (0, 1 << 30)]), ring_bytes([(50_000, 8192)]), ring_bytes([])
    (8192000, 268435456, 0)
    """
    sent = [(count, column) for count, column in matrices if count]
    whole = sum(aligned(count * column) for count, column in sent)
    least = PIECES * aligned(max((column for _, column in sent), default=0))
    return max(least, min(whole, aligned(RING_BYTES)))


def aligned(num_bytes: int) -> int:
    """Return the next multiple of `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


PASSING_BYTES = 1 << 26
"""Most bytes of one temporary tensor on the device while an update lands, or true weights come or
go: a card that training fills has room for few of them."""


def pieces(count: int, row_bytes: int) -> Iterator[slice]:
    """Yield slices of so many rows, each of at most `PASSING_BYTES`, or of one row.

    >>> [(part.start, part.stop) for part in pieces(5, PASSING_BYTES // 2)]
    [(0, 2), (2, 4), (4, 5)]
    """
    share = max(1, PASSING_BYTES // max(1, row_bytes))
    for first in range(0, count, share):
        yield slice(first, min(first + share, count))


# ---- weights of training, while the device shows the true ones ----------------------------------


def packed_into(
    sizes: Iterable[int], memories: Sequence[int]
) -> tuple[list[tuple[int, int]], int]:
    """Return a place for each of some pieces: in a memory that has room for it, or in a last one.

    Args:
        sizes: Bytes of each piece.
        memories: Bytes of each memory.

    Returns:
        (memory, first byte) of each piece, and the bytes of one more memory that holds the rest.

    >>> packed_into([4, 4, 4, 2], [5, 7])
    ([(0, 0), (1, 0), (2, 0), (1, 4)], 4)
    """
    filled = [0] * (len(memories) + 1)
    places = []
    for size in sizes:
        fitting = (i for i, most in enumerate(memories) if filled[i] + size <= most)
        index = next(fitting, len(memories))
        places.append((index, filled[index]))
        filled[index] += size
    return places, filled[-1]


# ---- gradients that wait on the host ------------------------------------------------------------

AUTOMATIC_DEPTH = 4
"""Largest depth q that is chosen automatically. With gradients of two bytes a pass moves
26 / q + 2 bytes of DRAM for each step and parameter. Beyond q = 4 a core's arithmetic takes
longer than that."""


def pool_bytes(staging_bytes: int, depth: int) -> int:
    """Return the bytes of the pool in which all blocks' further gradients wait.

    Blocks apply their queues in turn. So before a step between 0 and depth - 1 further gradients
    of each block wait, and (depth - 1) / 2 on average.

    Args:
        staging_bytes: Bytes of one step's deferred gradients.
        depth: Largest number of a column's gradients that wait.

    >>> [pool_bytes(1000, depth) for depth in (1, 2, 4)]
    [0, 525, 1575]
    """
    # The load is not quite even, and rooms leave gaps: a twentieth more is enough for both.
    return staging_bytes * (depth - 1) * 21 // 40


def queue_depth(wanted: int | None, update_interval: int, spare_pools: float) -> int:
    """Return q, the largest number of a column's gradients that may wait on the host.

    Args:
        wanted: Depth that was asked for; None chooses the depth by the memory.
        update_interval: Largest S: no gradient waits beyond its window's end.
        spare_pools: Host memory that may be used, in steps' deferred gradients.

    >>> [queue_depth(None, 8, spare) for spare in (0.0, 0.6, 100.0)]
    [1, 2, 4]
    >>> queue_depth(16, 8, 0.0)
    8
    """
    if wanted is not None:
        return min(wanted, update_interval)
    depth = min(AUTOMATIC_DEPTH, update_interval)
    while depth > 1 and pool_bytes(1000, depth) > 1000 * spare_pools:
        depth -= 1
    return depth


# ---- weights that visit the device --------------------------------------------------------------

COLUMN_STATE_BYTES = 12
"""Bytes of an element of a column that changes owner: master and moments in float32."""
MOVING_BYTES = 1 << 26
"""Largest number of bytes of state that several blocks move together; one block may move more."""
STREAMED_ELEMENTS = 1 << 16
"""Number of elements below which a weight of a streamed layer stays on the device."""
LEAST_SLOTS = 2
"""Least number of visiting layers on the device: one that computes, and another."""


def spread(num_layers: int, num_resident: int) -> set[int]:
    """Return the layers that stay on the device, evenly spread over the depth.

    So the link is busy all the time. In one run at either end it would stand still while all slots
    are full.

    >>> sorted(spread(6, 2)), sorted(spread(6, 0))
    ([1, 4], [])
    """
    return {(2 * rank + 1) * num_layers // (2 * num_resident) for rank in range(num_resident)}


# ---- sums of gradients that wait on the host ----------------------------------------------------

SUMS_AHEAD_BYTES = 1 << 28
"""Number of bytes of sums on their way to the device from which on no further one follows."""


# ---- states on a drive --------------------------------------------------------------------------

EXTENT_ELEMENTS = 1 << 20
"""Most elements of an extent, but for one whose only row is longer: 5 to 12 MiB of state."""
NUM_BUFFERS = 8
"""Number of buffers: those that are read, in use, and written at a time, and some between."""
SECTOR = 4096
"""Bytes at whose multiples direct reads and writes begin and end, in the file and in memory."""
_LINE = 64


def whole_sectors(num_bytes: int) -> int:
    """Return the next multiple of a sector."""
    return -(-num_bytes // SECTOR) * SECTOR


def tensor_ends(sizes: Iterable[int]) -> list[int]:
    """Return the byte behind each tensor of an extent, at which the next one begins.

    Args:
        sizes: Bytes of each tensor, which all begin at a cache line.

    >>> tensor_ends([100, 64, 1])
    [128, 192, 256]
    """
    ends, end = [], 0
    for size in sizes:
        end += -(-size // _LINE) * _LINE
        ends.append(end)
    return ends


def extent_rows(
    first: int, last: int, num_elements: int, most: int = EXTENT_ELEMENTS
) -> Iterator[tuple[int, int]]:
    """Yield the first row of each extent of a block, and the row after its last one.

    Args:
        first: The block's first row.
        last: Row after the block's last one.
        num_elements: Elements of a row.
        most: Most elements of an extent of several rows.

    >>> list(extent_rows(0, 5, 10, most=25))
    [(0, 2), (2, 4), (4, 5)]
    """
    rows = max(1, most // max(1, num_elements))
    for row in range(first, last, rows):
        yield row, min(row + rows, last)
