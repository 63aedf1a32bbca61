"""Columns change owner, and take master, moments and step count along.

In a *handover* columns of one block change owner, as many in each direction. In a *resizing* k
changes in mid-run: every block gets another number of important columns, so that rows move too.
Host rows move within their parameter's slab, one parameter at a time, and device banks are made
anew one after another.

Before a column leaves the host, all its gradients have been applied there. A column that comes to
the host has had all its gradients on the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from zenflow.columns.device_rows import Bank
from zenflow.columns.host_rows import ROW_STATE, MovingColumns
from zenflow.columns.host_shares import HostShares
from zenflow.columns.layout import Block, Layout, SplitParam
from zenflow.columns.placement import assign_banks, members_of
from zenflow.rule.blocks import important_count
from zenflow.rule.importance import select_columns
from zenflow.rule.sizes import COLUMN_STATE_BYTES, MOVING_BYTES


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
    finish_rows: Callable[[Block, Tensor], MovingColumns],
    hysteresis: float,
    shares: HostShares,
) -> dict[int, Tensor]:
    """Choose the blocks' important columns by their scores, and move those that change owner.

    The caller has waited for the blocks' host tasks, for the last step's gradient and for the last
    landing. Every read of the device's memory waits for it, so that all blocks are read together.

    Args:
        blocks: The blocks, changed in place.
        finish_rows: Returns copies of a block's host rows of some indices as the window's end
            leaves them.
        hysteresis: Share by which a newcomer must exceed the column it replaces.
        shares: Ranks whose hosts have the rows of columns that leave.

    Returns:
        Which host rows take part in the window's update, shape (D,), uint8, by the block's index.
    """
    active = {
        block.index: torch.ones(block.shape.num_deferred, dtype=torch.uint8, device="cpu")
        for block in blocks
    }
    for group in _groups(_choose(blocks, hysteresis)):
        _move(group, [finish_rows(swap.block, swap.rows) for swap in group], shares)
        for swap in group:
            active[swap.block.index][swap.rows] = 0
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
    """Indices of a `Swap`, copied to the device: (n,), int64 each."""

    rows: Tensor
    """Indices of the host rows that leave."""
    ranks: Tensor
    """Positions of the important columns that come in exchange."""
    to_device: Tensor
    """Indices of the columns that leave the host."""
    to_host: Tensor
    """Indices of the columns that come to the host."""


def _move(swaps: Sequence[Swap], leaving: Sequence[MovingColumns], shares: HostShares) -> None:
    """Bring the banks' rows to the host's, and put the leaving ones in their place."""
    device = swaps[0].block.columns.scores.device
    _write_newer(swap.block.split for swap in swaps)
    sent = iter(
        _send([t for s in swaps for t in (s.rows, s.ranks, s.to_device, s.to_host)], device)
    )
    there = [_There(*islice(sent, 4)) for _ in swaps]
    places = [s.block.bank_first + own.ranks for s, own in zip(swaps, there, strict=True)]
    entering = {}
    for name in ROW_STATE:
        banks = [getattr(swap.block.split.bank, name) for swap in swaps]
        taken = [bank[place] for bank, place in zip(banks, places, strict=True)]
        values: Sequence[Tensor] = _send([getattr(rows, name) for rows in leaving], device)
        if name != "step":  # of which every rank has all
            parts = [swap.block.split.part for swap in swaps]
            taken = [part.of(rows, 1) for part, rows in zip(parts, taken, strict=True)]
            values = shares.gather(values, [swap.block.split.num_rows for swap in swaps])
        entering[name] = _fetch(taken)
        for index in range(len(swaps)):
            banks[index][places[index]] = values[index]
    for index, swap in enumerate(swaps):
        columns = MovingColumns(*(entering[name][index] for name in ROW_STATE))
        swap.block.host.put(swap.rows, columns)
    for swap, own, place in zip(swaps, there, places, strict=True):
        _rename(swap.block, own, place)
    for split in dict.fromkeys(swap.block.split for swap in swaps):
        split.note_owners()


def _write_newer(splits: Iterable[SplitParam]) -> None:
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
    return _apart(torch.cat([tensor.reshape(-1) for tensor in tensors]).cpu(), tensors)


def _send(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return copies of tensors of one dtype on the device, by one copy to it."""
    return _apart(torch.cat([tensor.reshape(-1) for tensor in tensors]).to(device), tensors)


def _apart(values: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = values.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


@dataclass(frozen=True, slots=True)
class Rows:
    """A move of rows: row `source[i]` of one side becomes row `target[i]` of the same or other."""

    target: Tensor
    """Index that each row gets, (n,), int64, on the host."""
    source: Tensor
    """Index that each row had, (n,), int64, on the host."""


@dataclass(frozen=True, slots=True)
class RowMoves:
    """Origin of every row of one parameter in a resizing; columns ascend on both sides."""

    deferred: Tensor
    """Column of each new host row, (D',)."""
    important: Tensor
    """Column of each new bank row, (K',)."""
    stay: Rows
    """Moves of host rows to host rows."""
    enter: Rows
    """Moves of bank rows to host rows."""
    keep: Rows
    """Moves of bank rows to bank rows."""
    leave: Rows
    """Moves of host rows to bank rows."""

    @classmethod
    def of(cls, split: SplitParam, chosen: Tensor) -> RowMoves:
        """Return the moves that make the chosen columns, (I,) bool on the host, important."""
        row_of = _ranks(split.deferred_columns.cpu(), split.num_columns)
        rank_of = _ranks(split.important_columns.cpu(), split.num_columns)
        deferred = (~chosen).nonzero().squeeze(1)
        important = chosen.nonzero().squeeze(1)
        return cls(
            deferred=deferred,
            important=important,
            stay=_present(row_of[deferred]),
            enter=_present(rank_of[deferred]),
            keep=_present(rank_of[important]),
            leave=_present(row_of[important]),
        )


def _ranks(columns: Tensor, num_columns: int) -> Tensor:
    """Return each column's position in the list, -1 for a column that is not in the list."""
    ranks = torch.full((num_columns,), -1, device="cpu")
    ranks[columns] = torch.arange(len(columns), device="cpu")
    return ranks


def _present(sources: Tensor) -> Rows:
    target = (sources >= 0).nonzero().squeeze(1)
    return Rows(target, sources[target])


@torch.no_grad()
def resize(layout: Layout, topk_ratio: float, hysteresis: float) -> None:
    """Let each block choose the number of important columns that another k asks for.

    No update may be in flight and no gradient may wait: tensors are replaced.

    Args:
        layout: Places of all parameters, changed in place.
        topk_ratio: New ratio in (0, 1), at least the layout's `least_topk_ratio`.
        hysteresis: Share by which a newcomer must exceed the column it replaces.
    """
    _write_newer(layout.splits)
    shapes = {
        block.index: replace(
            block.shape, num_important=important_count(topk_ratio, block.shape.num_columns)
        )
        for block in layout.blocks
    }
    counts = [sum(shapes[b.index].num_important for b in split.blocks) for split in layout.splits]
    banks, places = assign_banks(layout.splits, counts)
    waiting = Counter(id(split.bank) for split in layout.splits)
    # Bank by bank, so that an old one is given up before the next new one is made.
    for bank in banks:
        bank.allocate(layout.columns.scores.device)
        for split, place in zip(layout.splits, places, strict=True):
            if place[0] is not bank:
                continue
            for block in split.blocks:
                block.shape = shapes[block.index]
            former = split.bank
            _resize_param(split, *place, hysteresis, layout.shares)
            waiting[id(former)] -= 1
            if not waiting[id(former)]:
                former.free()
    layout.banks[:] = banks
    layout.members[:] = [members_of(bank, layout.splits) for bank in banks]
    layout.topk_ratio = topk_ratio
    layout.version += 1


def _resize_param(
    split: SplitParam, bank: Bank, first: int, hysteresis: float, shares: HostShares
) -> None:
    """Choose one parameter's columns, move its rows, and give its blocks their new views."""
    chosen = torch.cat(
        [
            select_columns(
                block.columns.scores,
                block.columns.is_important,
                block.shape.num_important,
                hysteresis,
            )
            for block in split.blocks
        ]
    )
    moves = RowMoves.of(split, chosen.cpu())
    _move_rows(split, bank, first, moves, shares)
    device = bank.master.device
    split.bank, split.bank_first = bank, first
    split.host = split.slab_rows.rows(slice(len(moves.deferred)))
    split.deferred_columns = moves.deferred.to(device)
    split.important_columns = moves.important.to(device)
    split.share_out()
    split.note_owners()
    leaving = moves.leave.target.to(device)
    with split.held(changes=True):
        weight_OI = split.weight()
        fresh_OL = bank.master[first + leaving].t().to(weight_OI)
        weight_OI.index_copy_(1, split.important_columns[leaving], fresh_OL)


def _move_rows(
    split: SplitParam, bank: Bank, first: int, moves: RowMoves, shares: HostShares
) -> None:
    """Move every row to its new owner and index."""
    last = first + len(moves.important)
    device = bank.master.device
    leaving = split.slab_rows.copies(moves.leave.source)
    entering = {}
    for name in ROW_STATE:
        former = getattr(split.bank, name)[split.bank_first : split.bank_last]
        rows = getattr(bank, name)[first:last]
        rows[moves.keep.target.to(device)] = former[moves.keep.source.to(device)]
        values = getattr(leaving, name).to(device)
        if name != "step":  # of which every rank has all
            (values,) = shares.gather([values], [split.num_rows])
            former = split.part.of(former, 1)
        rows[moves.leave.target.to(device)] = values
        entering[name] = former[moves.enter.source.to(device)].cpu()
    split.slab_rows.move(moves.stay.target, moves.stay.source)
    split.slab_rows.put(moves.enter.target, MovingColumns(**entering))
