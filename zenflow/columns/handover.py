"""Columns change owner, and take master, moments and step count along.

In a *handover* columns of one block change owner, as many in each direction.
`zenflow.columns.resizing` has changes of k, which move other rows too.

Before a column leaves the host, all its gradients have been applied there. A column that comes to
the host has had all its gradients on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from zenflow.columns.host_rows import ROW_STATE, MovingColumns
from zenflow.columns.host_shares import HostShares
from zenflow.columns.layout import Block, SplitParam
from zenflow.device.base import AbstractDevice, HostValues
from zenflow.rule.importance import select_columns
from zenflow.rule.sizes import COLUMN_STATE_BYTES, MOVING_BYTES

NUMBERS = ROW_STATE[1:]
"""Names of a column's state in float32."""

FinishRows = Callable[[Block, Tensor, Sequence[Tensor]], Tensor]
"""Function of a block, indices of host rows, and an (n, O) output for each of `NUMBERS`; returns
the rows' Adam steps."""


@dataclass(frozen=True, slots=True)
class Swap:
    """Columns of one block that change owner, as many in each direction."""

    block: Block
    """Block whose columns change owner."""
    rows: Tensor
    """Host rows that leave, (n,), int64, on the host."""
    ranks: Tensor
    """Positions, among the block's important columns, of the columns that come in exchange, (n,),
    int64, on the host."""
    to_device: Tensor
    """Columns that leave the host, (n,), int64, on the host."""
    to_host: Tensor
    """Columns that come to the host, (n,), int64, on the host."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the state that moves in each direction."""
        return COLUMN_STATE_BYTES * len(self.rows) * self.block.split.num_rows


@torch.no_grad()
def hand_over(
    blocks: Sequence[Block],
    finish_rows: FinishRows,
    hysteresis: float,
    shares: HostShares,
    device: AbstractDevice,
) -> dict[int, Tensor]:
    """Choose the blocks' important columns by their scores, and move those that change owner.

    The caller has waited for the blocks' host tasks, for the last step's gradient and for the last
    landing. Every read of the device's memory waits for it. So the scores of all blocks are read
    together, and columns come to the host while the next group's are made ready to leave.

    Args:
        blocks: The blocks, changed in place.
        finish_rows: Writes a block's host rows of some indices, as the window's end leaves them,
            to memory of the host.
        hysteresis: Share by which a newcomer must exceed the column it replaces.
        shares: Ranks whose hosts have the rows of columns that leave.
        device: The device.

    Returns:
        Which host rows take part in the window's update, shape (D,), uint8, by the block's index.
    """
    active = {
        block.index: torch.ones(block.shape.num_deferred, dtype=torch.uint8, device="cpu")
        for block in blocks
    }
    before: _Entering | None = None
    for group in _groups(_choose(blocks, hysteresis)):
        entering = _exchange(group, finish_rows, shares, device)
        if before is not None:
            before.put()
        before = entering
        for swap in group:
            active[swap.block.index][swap.rows] = 0
    if before is not None:
        before.put()
    return active


def _choose(blocks: Sequence[Block], hysteresis: float) -> Iterator[Swap]:
    """Yield the swaps that the columns' scores ask for."""
    scores = _fetch([block.columns.scores for block in blocks])
    deferred = _fetch([block.deferred_columns for block in blocks])
    important = _fetch([block.important_columns for block in blocks])
    for block, score, its_deferred, its_important in zip(
        blocks, scores, deferred, important, strict=True
    ):
        offset, count = block.shape.first, block.shape.num_important
        is_important = torch.zeros(block.shape.num_columns, dtype=torch.bool, device="cpu")
        is_important[its_important - offset] = True
        chosen = select_columns(score, is_important, count, hysteresis)
        # Both lists have the same length: what leaves one side enters the other.
        rows = chosen[its_deferred - offset].nonzero().squeeze(1)
        ranks = (~chosen[its_important - offset]).nonzero().squeeze(1)
        if len(rows):
            yield Swap(block, rows, ranks, its_deferred[rows], its_important[ranks])


def _groups(swaps: Iterable[Swap]) -> Iterator[list[Swap]]:
    """Yield groups of swaps that move together, each within `MOVING_BYTES`."""
    group: list[Swap] = []
    for swap in swaps:
        if group and sum(s.num_bytes for s in group) + swap.num_bytes > MOVING_BYTES:
            yield group
            group = []
        group.append(swap)
    if group:
        yield group


@dataclass(frozen=True, slots=True)
class _There:
    """A `Swap` on the device: (n,), int64 each."""

    rows: Tensor
    """Indices of the host rows that leave."""
    ranks: Tensor
    """Positions of the important columns that come in exchange."""
    to_device: Tensor
    """Indices of the columns that leave the host."""
    to_host: Tensor
    """Indices of the columns that come to the host."""
    step: Tensor
    """Adam steps that the columns which leave the host have taken."""


@dataclass(frozen=True, slots=True)
class _Entering:
    """Columns of a group of swaps on their way to the host."""

    swaps: Sequence[Swap]
    """Swaps that bring the columns."""
    steps: HostValues
    """Adam steps that the columns have taken, int64, one swap's after another's."""
    numbers: HostValues
    """Masters and moments of the columns, float32, as `_shapes` orders them."""

    def put(self) -> None:
        """Wait for the columns, and write them to their rows."""
        counts = self.steps.tensor().split([len(swap.rows) for swap in self.swaps])
        numbers = _apart(self.numbers.tensor(), _shapes(self.swaps))
        for place, (swap, step) in enumerate(zip(self.swaps, counts, strict=True)):
            own = numbers[place :: len(self.swaps)]
            swap.block.host.put(swap.rows, MovingColumns(step, *own))


def _exchange(
    swaps: Sequence[Swap], finish_rows: FinishRows, shares: HostShares, device: AbstractDevice
) -> _Entering:
    """Put a group's leaving rows into the banks, and send the banks' rows to the host.

    Each side has one message of whole numbers and one of state, and nothing waits for the device.
    """
    write_newer(swap.block.split for swap in swaps)
    shapes = _shapes(swaps)
    leaving = device.host_memory(sum(map(math.prod, shapes)), torch.float32)
    rooms = _apart(leaving, shapes)
    there = _send_indices(
        swaps,
        [finish_rows(s.block, s.rows, rooms[i :: len(swaps)]) for i, s in enumerate(swaps)],
        device,
    )
    places = [s.block.bank_first + own.ranks for s, own in zip(swaps, there, strict=True)]
    entering = _Entering(swaps, *_take(swaps, places, shapes, device))
    sent = _apart(device.send(leaving), shapes)
    for index, name in enumerate(NUMBERS):
        whole: Sequence[Tensor] = sent[index * len(swaps) : (index + 1) * len(swaps)]
        if name not in swaps[0].block.split.bank.left_out:
            whole = shares.gather(whole, [swap.block.split.num_rows for swap in swaps])
        for swap, place, values in zip(swaps, places, whole, strict=True):
            getattr(swap.block.split.bank, name)[place] = values
    for swap, own, place in zip(swaps, there, places, strict=True):
        swap.block.split.bank.step[place] = own.step
        _rename(swap.block, own, place)
    for split in dict.fromkeys(swap.block.split for swap in swaps):
        split.note_owners()
    return entering


def _shapes(swaps: Sequence[Swap]) -> list[tuple[int, int]]:
    """Return the shape of each swap's masters on the host, then first and second moments."""
    return [
        (len(swap.rows), swap.block.host.widths[place])
        for place in range(len(NUMBERS))
        for swap in swaps
    ]


def _send_indices(
    swaps: Sequence[Swap], steps: Sequence[Tensor], device: AbstractDevice
) -> list[_There]:
    """Return each swap's indices on the device, and the steps of columns that leave the host."""
    own = [
        tensor
        for s, step in zip(swaps, steps, strict=True)
        for tensor in (s.rows, s.ranks, s.to_device, s.to_host, step)
    ]
    host = device.host_memory(sum(map(len, own)), torch.int64)
    torch.cat(own, out=host)
    sent = iter(device.send(host).split([len(tensor) for tensor in own]))
    return [_There(*islice(sent, 5)) for _ in swaps]


def _take(
    swaps: Sequence[Swap],
    places: Sequence[Tensor],
    shapes: Sequence[tuple[int, int]],
    device: AbstractDevice,
) -> tuple[HostValues, HostValues]:
    """Begin to copy the steps and numbers of the banks' rows at these places to the host."""
    splits = [swap.block.split for swap in swaps]
    steps = [split.bank.step[place] for split, place in zip(splits, places, strict=True)]
    numbers = torch.empty(
        sum(map(math.prod, shapes)), dtype=torch.float32, device=device.torch_device
    )
    rooms = iter(_apart(numbers, shapes))
    for name in NUMBERS:
        for split, place in zip(splits, places, strict=True):
            own = split.own_part(getattr(split.bank, name))
            torch.index_select(own, 0, place, out=next(rooms))
    return device.to_host(torch.cat(steps)), device.to_host(numbers)


def write_newer(splits: Iterable[SplitParam]) -> None:
    """Let streamed weights have their banks' rows, while these are still theirs."""
    for split in splits:
        if split.page is not None and split.page.home_is_stale:
            with split.held(changes=True):  # so that it goes home
                pass


def _rename(block: Block, there: _There, place: Tensor) -> None:
    """Update a block's column indices after a swap, and write the new weights on the device.

    Args:
        block: The block.
        there: Its swap's indices.
        place: Bank rows of the columns that are the device's now, (n,), int64.
    """
    block.deferred_columns[there.rows] = there.to_host
    block.important_columns[there.ranks] = there.to_device
    masters_NO = block.split.bank.master[place]
    with block.split.held(changes=True):
        weight_OI = block.split.weight()
        weight_OI.index_copy_(1, there.to_device, masters_NO.t().to(weight_OI))


def _fetch(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of tensors of one dtype on the host, by one copy from the device."""
    values = torch.cat([tensor.reshape(-1) for tensor in tensors]).cpu()
    return _apart(values, [tensor.shape for tensor in tensors])


def _apart(values: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return views of these shapes, one after another, of memory that they fill."""
    parts = values.split([math.prod(shape) for shape in shapes])
    return [part.view(*shape) for part, shape in zip(parts, shapes, strict=True)]
