"""Changed weights: marks of those that an upload changes, and their values one after another.

A column of O weights has 8 ceil(O / 64) bytes of marks: a bit for each weight, the lowest bit of a
byte first, and zeros behind the last. The values of marked weights follow one another, column by
column. So a share f of changed weights of two bytes takes 1/8 + 2 f bytes a weight, in place of 2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zenflow.host.library import c_library

MOST_CHANGED = 0.8
"""Largest share of changed weights for which their values alone are sent. From 0.94 on these and
the marks would take more bytes than all weights."""


def mark(marks: Tensor, before: Tensor, now: Tensor) -> None:
    """Write the marks of weights that differ in any bit.

    Args:
        marks: Output, uint8 (R, 8 ceil(O / 64)).
        before: Weights of two bytes, (R, O).
        now: Weights of the same dtype, (R, O).
    """
    differs = torch.zeros(len(marks), marks.shape[1], 8, dtype=torch.uint8, device=marks.device)
    differs.view(len(marks), -1)[:, : now.shape[1]] = before.view(torch.int16) != now.view(
        torch.int16
    )
    torch.sum(differs << _bits(marks), 2, dtype=torch.uint8, out=marks)


def marked(marks: Tensor, num_elements: int) -> Tensor:
    """Return which of a row's elements are marked, bool (R, O), on the marks' device."""
    bits = marks.unsqueeze(2) >> _bits(marks) & 1
    return bits.view(len(marks), -1)[:, :num_elements].bool()


def gather(values: Tensor, marks: Tensor) -> Tensor | None:
    """Move the marked ones of some weights to the beginning of their memory, in order.

    Args:
        values: Weights of two bytes, contiguous (R, O); changed.
        marks: Their marks.

    Returns:
        The marked ones, (n,). None where they are more than `MOST_CHANGED`, or with the marks have
        more bytes than all: nothing is moved then.
    """
    spare = (values.nbytes - marks.nbytes) // values.itemsize
    most = min(int(MOST_CHANGED * values.numel()), spare)
    library = c_library()
    if most < 0:  # rows are short
        return None
    if library is None:
        own = values[marked(marks, values.shape[1])]
        if len(own) > most:
            return None
        values.view(-1)[: len(own)] = own
        return values.view(-1)[: len(own)]
    pointers = values.data_ptr(), marks.data_ptr()
    count = library.zenflow_gather_marked(*pointers, *values.shape, most)
    return None if count > most else values.view(-1)[:count]


def put(rows: Tensor, marks: Tensor, values: Tensor) -> None:
    """Write the values of marked weights, (n,), into all weights, (R, O), on any device."""
    rows.masked_scatter_(marked(marks, rows.shape[1]), values)


def _bits(marks: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=marks.device)
