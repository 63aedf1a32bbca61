"""Host rows of the compact format: random bits go by the row's place and the column's steps."""

import pytest
import torch

from zenflow.columns.host_rows import HostSlabs, MovingColumns, RowShape
from zenflow.device.cpu import CpuDevice
from zenflow.host.compact import CompactState, Rounding, keys_of

NUM_ROWS, WHOLE_ROWS, FIRST_ROW = 70, 198, 128
SHAPE = RowShape(
    num_columns=6, num_rows=NUM_ROWS, gradient_width=NUM_ROWS, dtype=torch.float32,
    whole_rows=WHOLE_ROWS, first_row=FIRST_ROW,
)  # fmt: skip


def taken(count):
    """Return the rows of the last of so many parameters."""
    slabs = HostSlabs(CpuDevice(torch.device("cpu")), [SHAPE] * count, CompactState)
    return [slabs.take(SHAPE) for _ in range(count)][-1]


@pytest.mark.parametrize("first", [0, 2])
def test_columns_that_come_are_rounded_by_their_rows_bits(first):
    torch.manual_seed(0)
    step = torch.tensor([7, 30])
    numbers = [torch.randn(2, NUM_ROWS), torch.randn(2, NUM_ROWS), torch.rand(2, NUM_ROWS)]
    rows, own = taken(2), torch.tensor([3, 1])
    rows.rows(slice(first, 6)).put(own, MovingColumns(step, *numbers))
    expected = CompactState.zeros(2, NUM_ROWS)
    elements = FIRST_ROW + (first + own) * WHOLE_ROWS
    expected.encode(*numbers, Rounding.drawn(keys_of(2, step), elements, NUM_ROWS))
    for ours, theirs in zip(rows.state.tensors(), expected.tensors(), strict=True):
        assert torch.equal(ours[first + own], theirs)
        assert not ours[[row for row in range(6) if row not in (first + own)]].any()
    assert torch.equal(rows.step[first + own], step)
