"""Gradients in eight bits: E4M3 numbers, with an exponent byte for each 64 of a column.

A column of O numbers is a row of O + ceil(O / 64) bytes here: the numbers' codes, then the
exponent bytes of its groups. A code has a sign and seven bits c, four of exponent and three of
mantissa. With e the group's byte, c means the float32 whose bits are (c + 8 e) << 20, and 0 means
0. The byte is such that the group's largest number, rounded, has the largest exponent. So numbers
down to 2^-15 of it keep four bits, and those under 2^-16 of it become 0.

A gradient is rounded to nearest, ties to even. The error is relative to each number, so that a
second moment is too large by about a thousandth; with integers as codes the small numbers of a
group would lose theirs. A group that has a number that is not finite is NaN as a whole.

These are the torch operations that the compiled kernels agree with bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from zenflow.host_state import GROUP, gradient_width, num_groups

LEAST, NOT_FINITE = 2, 240
"""Smallest exponent byte, whose numbers are all normal float32, and that of a group with infinity
or NaN."""
_ROOM = 15
"""Octaves from the exponent byte to the exponent of the group's largest number."""
_MANTISSA, _BITS = 23, 20
"""Bits of a float32's mantissa, and those of them below a code's."""
_INFINITY, _SIZE = 0x7F800000, 0x7FFFFFFF
_MOST_CODE = 127
_PIECE_ELEMENTS = {"cpu": 1 << 19}
"""Elements that are converted at once, by type of device, since a conversion takes several times
their memory. A CPU has less in its caches than others need to be busy."""
_OTHER_PIECE = 1 << 23


def encode(values: Tensor, out: Tensor) -> None:
    """Round a matrix into rows of bytes.

    Args:
        values: Numbers, (R, O) in any float dtype.
        out: Output, uint8 (R, O + ceil(O / 64)), on the values' device.
    """
    for part in _pieces(values):
        _encode(values[part], out[part])


def _encode(values: Tensor, out: Tensor) -> None:
    num_rows, num_elements = values.shape
    groups = num_groups(num_elements)
    wide = torch.zeros(num_rows, groups * GROUP, dtype=torch.float32, device=values.device)
    wide[:, :num_elements] = values
    bits = wide.view(torch.int32).view(num_rows, groups, GROUP)
    sign = (bits >> 24) & 0x80
    size = bits & _SIZE
    largest = size.amax(2).clamp_max_(_INFINITY)
    exponents = ((_nearest(largest) >> 3) - _ROOM).clamp_min_(LEAST).unsqueeze(2)
    code = _nearest(size) - 8 * exponents
    # Under the smallest code's number: that one from its half on, 0 below.
    smallest = 8 * exponents + 1 << _BITS
    lifted = (size > smallest - (1 << _MANTISSA)).to(torch.int32)
    code = torch.maximum(code, lifted).clamp_max_(_MOST_CODE) | sign
    out[:, :num_elements] = code.view(num_rows, groups * GROUP)[:, :num_elements]
    out[:, num_elements:] = exponents.squeeze(2)


def _nearest(size: Tensor) -> Tensor:
    """Return the bits of sizes that are left above `_BITS`, rounded to nearest even."""
    return size + 0x7FFFF + ((size >> _BITS) & 1) >> _BITS


def decode(rows: Tensor) -> Tensor:
    """Return the numbers of rows of bytes, uint8 (R, O + ceil(O / 64)): float32 (R, O)."""
    num_elements = num_elements_of(rows.shape[1])
    codes, exponents = rows[:, :num_elements].to(torch.int32), rows[:, num_elements:]
    each = exponents.repeat_interleave(GROUP, 1)[:, :num_elements].to(torch.int32)
    size = codes & _MOST_CODE
    bits = torch.where(size > 0, size + 8 * each << _BITS, 0) | codes >> 7 << 31
    return bits.view(torch.float32).masked_fill_(each == NOT_FINITE, math.nan)


def rounded(values: Tensor) -> Tensor:
    """Return a matrix of gradients, (R, O), as the host gets it: float32 (R, O)."""
    num_rows, num_elements = values.shape
    width = gradient_width("e4m3", num_elements)
    rows = torch.empty(num_rows, width, dtype=torch.uint8, device=values.device)
    encode(values, rows)
    return decode(rows)


def num_elements_of(width: int) -> int:
    """Return the number of elements in a row of so many bytes.

    >>> [num_elements_of(gradient_width("e4m3", count)) for count in (1, 64, 65, 1000)]
    [1, 64, 65, 1000]
    """
    return width - -(-width // (GROUP + 1))


def _pieces(values: Tensor) -> Iterator[slice]:
    num_rows, num_elements = values.shape
    most = _PIECE_ELEMENTS.get(values.device.type, _OTHER_PIECE)
    step = max(1, most // max(1, num_elements))
    for low in range(0, num_rows, step):
        yield slice(low, low + step)
