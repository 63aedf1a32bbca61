"""Formats of what the host keeps: names and sizes. The simulator counts by them too."""

from __future__ import annotations

from typing import Literal

HostState = Literal["float32", "compact"]
"""Format of the host's weights and moments."""
GradientLink = Literal["model", "e4m3"]
"""Format of gradients on the link, and of those that wait on the host."""
Uploads = Literal["all", "changed"]
"""Weights that are uploaded at a window's end."""
SecondMoment = Literal["element", "factored"]
"""Second moments: one of each element, or one of each row and column of a matrix."""

GROUP = 64
"""Number of elements of a column that share an exponent byte, in all formats of few bytes."""
MARKED_BYTES = 2
"""Bytes of a weight of which changed ones may be uploaded alone: longer ones change in every
step."""
MOST_WAITING = 64
"""Largest number of gradients that one pass applies to compact state."""


def state_bytes(
    host_state: HostState, num_columns: int, num_rows: int, second_moment: SecondMoment
) -> int:
    """Return the bytes of the host's weights and moments of some columns.

    >>> [state_bytes(state, 1, 1000, "element") for state in ("float32", "compact")]
    [12000, 5032]
    >>> [state_bytes(state, 1, 1000, "factored") for state in ("float32", "compact")]
    [8000, 4016]
    """
    return sum(tensor_bytes(host_state, num_columns, num_rows, second_moment))


def tensor_bytes(
    host_state: HostState, num_columns: int, num_rows: int, second_moment: SecondMoment
) -> tuple[int, ...]:
    """Return the bytes of each tensor of some columns' state, those of the weights first.

    >>> tensor_bytes("compact", 1, 1000, "element")
    (2000, 1000, 1000, 1000, 16, 16)
    """
    numbers = num_columns * num_rows
    seconds = 1 if second_moment == "element" else 0
    if host_state == "float32":
        return 4 * numbers, 4 * numbers, 4 * seconds * numbers
    exponents = num_columns * num_groups(num_rows)
    moments = (numbers, seconds * numbers, exponents, seconds * exponents)
    return 2 * numbers, numbers, *moments


def gradient_width(gradient_link: GradientLink, num_rows: int) -> int:
    """Return the length of a gradient's column on the link, in numbers of its type there.

    An 8-bit column of O numbers is followed by an exponent byte for each 64 of them.

    >>> gradient_width("model", 1000), gradient_width("e4m3", 1000)
    (1000, 1016)
    """
    return num_rows if gradient_link == "model" else num_rows + num_groups(num_rows)


def gradient_bytes(gradient_link: GradientLink, dtype_bytes: int) -> float:
    """Return the bytes of a gradient's number on the link, in a long column.

    >>> gradient_bytes("model", 2), gradient_bytes("e4m3", 2)
    (2, 1.015625)
    """
    if gradient_link == "model":
        return dtype_bytes
    return gradient_width(gradient_link, GROUP) / GROUP


def column_bytes(gradient_link: GradientLink, num_rows: int, dtype_bytes: int) -> int:
    """Return the bytes of a gradient's column on the link.

    >>> column_bytes("model", 1000, 2), column_bytes("e4m3", 1000, 2)
    (2000, 1016)
    """
    size = dtype_bytes if gradient_link == "model" else 1
    return size * gradient_width(gradient_link, num_rows)


def mark_bytes(num_rows: int) -> int:
    """Return the bytes of a column's marks, a bit for each number, in words of 64.

    >>> mark_bytes(1000)
    128
    """
    return num_groups(num_rows) * GROUP // 8


def num_groups(num_rows: int) -> int:
    """Return the number of groups of a column, the last of which may be shorter."""
    return -(-num_rows // GROUP)
