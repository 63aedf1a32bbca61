"""Size of the memory in which gradients queue on the host. Pure arithmetic.

The engine allocates this size, and the simulator counts it.
"""

from __future__ import annotations

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
