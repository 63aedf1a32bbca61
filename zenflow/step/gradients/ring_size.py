"""Size of the ring through which released gradients leave a GPU. Pure arithmetic.

The engine allocates this size, and the simulator counts it.
"""

from __future__ import annotations

from collections.abc import Iterable

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
