"""Formats of the host's weights and moments: names and sizes. The simulator counts by them too."""

from __future__ import annotations

from typing import Literal

HostState = Literal["float32", "compact"]

GROUP = 64
"""Number of elements of a column that share an exponent byte in the compact format."""
MOST_WAITING = 64
"""Largest number of gradients that one pass applies to compact state."""


def state_bytes(host_state: HostState, num_columns: int, num_rows: int) -> int:
    """Return the bytes of the host's weights and moments of some columns.

    >>> state_bytes("float32", 1, 1000), state_bytes("compact", 1, 1000)
    (12000, 5032)
    """
    if host_state == "float32":
        return 12 * num_columns * num_rows
    return num_columns * (5 * num_rows + 2 * -(-num_rows // GROUP))
