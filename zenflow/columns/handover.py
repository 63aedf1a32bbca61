"""Columns change owner, and take master, moments and step count along.

In a handover the columns of one block do, as many in each direction. In a resizing every block
gets another number of important columns, k, in mid-run, so that rows move too. Memory stays what
it was: host rows move within their parameter's room, one field at a time, and device banks are
made anew one after another.

In both, a column that leaves the host first gets its share of the window. One that comes to the
host has no share of it: its gradients were applied on the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zenflow.columns.device_rows import Bank
from zenflow.columns.host_rows import ROW_STATE, HostRows
from zenflow.columns.host_update import WindowUpdate
from zenflow.columns.layout import Block, Layout, SplitParam
from zenflow.columns.placement import assign_banks, members_of
from zenflow.rule.blocks import important_count
from zenflow.rule.importance import select_columns


@torch.no_grad()
def hand_over(
    block: Block, update: WindowUpdate | None, factor: float, hysteresis: float
) -> Tensor:
    """Choose the block's important columns anew and move the difference.

    The caller has waited for the block's host tasks, for the last step's gradient and for the last
    landing.

    Args:
        block: The block, changed in place.
        update: The window's update; None if there was no gradient in it.
        factor: The last step's clip factor.
        hysteresis: Share by which a newcomer must exceed the column it replaces.

    Returns:
        Which host rows take part in the window's update, shape (D,), uint8.
    """
    active = torch.ones(block.shape.num_deferred, dtype=torch.uint8)
    offset = block.shape.first
    vectors = block.columns
    chosen = select_columns(
        vectors.scores, vectors.is_important, block.shape.num_important, hysteresis
    )
    # Both lists have the same length: what leaves one side enters the other.
    rows = chosen[block.deferred_columns - offset].nonzero().squeeze(1)
    ranks = (~chosen[block.important_columns - offset]).nonzero().squeeze(1)
    if len(rows) == 0:
        return active
    host_rows = rows.cpu()
    leaving = _finish_window(block, host_rows, update, factor)
    _swap_state(block, host_rows, ranks + block.bank_first, leaving)
    to_device, to_host = block.deferred_columns[rows], block.important_columns[ranks]
    block.deferred_columns[rows] = to_host
    block.important_columns[ranks] = to_device
    vectors.is_important.copy_(chosen)
    weight_OI = block.split.weight()
    weight_OI.index_copy_(1, to_device, leaving.master.t().to(weight_OI))
    active[host_rows] = 0
    return active


def _finish_window(
    block: Block, rows: Tensor, update: WindowUpdate | None, factor: float
) -> HostRows:
    """Return copies of the rows, stepped by their share of the window."""
    leaving = block.host.rows(rows)
    if update is not None:
        active = torch.ones(len(rows), dtype=torch.uint8)
        update.apply(leaving, factor, active, torch.empty_like(leaving.staging))
    return leaving


def _swap_state(block: Block, rows: Tensor, bank_rows: Tensor, leaving: HostRows) -> None:
    """Bring the bank's rows to the host's and put the leaving ones in their place."""
    for name in ROW_STATE:
        bank_values = getattr(block.split.bank, name)
        entering = bank_values[bank_rows].cpu()
        bank_values[bank_rows] = getattr(leaving, name).to(bank_values.device)
        getattr(block.host, name)[rows] = entering


@dataclass(frozen=True, slots=True)
class Rows:
    """Where rows go: row `source[i]` of a side becomes row `target[i]` of another or the same."""

    target: Tensor
    """Row that each one becomes, (n,), int64, on the host."""
    source: Tensor
    """Row that each one was, (n,), int64, on the host."""


@dataclass(frozen=True, slots=True)
class RowMoves:
    """Where every row of one parameter comes from; columns ascend on both sides."""

    deferred: Tensor
    """Column of each host row to be, (D',)."""
    important: Tensor
    """Column of each bank row to be, (K',)."""
    stay: Rows
    """Host rows from host rows."""
    enter: Rows
    """Host rows from bank rows."""
    keep: Rows
    """Bank rows from bank rows."""
    leave: Rows
    """Bank rows from host rows."""

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
    """Return each column's place in the list, -1 where it is not in it."""
    ranks = torch.full((num_columns,), -1)
    ranks[columns] = torch.arange(len(columns))
    return ranks


def _present(sources: Tensor) -> Rows:
    target = (sources >= 0).nonzero().squeeze(1)
    return Rows(target, sources[target])


@torch.no_grad()
def resize(
    layout: Layout,
    topk_ratio: float,
    hysteresis: float,
    updates: Mapping[int, WindowUpdate],
    factor: float,
) -> dict[int, Tensor]:
    """Let each block choose its important columns anew, with the number for another ratio.

    Nothing may be in flight, on the host or on the device: tensors are replaced.

    Args:
        layout: Changed in place.
        topk_ratio: New ratio in (0, 1), at least the layout's `least_topk_ratio`.
        hysteresis: Share by which a newcomer must exceed the column it replaces.
        updates: The update of each block's window, by the block's index; none for a window
            without gradients.
        factor: The last step's clip factor.

    Returns:
        By block, which host rows take part in the window's update, shape (D',), uint8.
    """
    shapes = {
        block.index: replace(
            block.shape, num_important=important_count(topk_ratio, block.shape.num_columns)
        )
        for block in layout.blocks
    }
    counts = [sum(shapes[b.index].num_important for b in split.blocks) for split in layout.splits]
    banks, places = assign_banks(layout.splits, counts)
    waiting = Counter(id(split.bank) for split in layout.splits)
    active: dict[int, Tensor] = {}
    # Bank by bank, so that an old one is given up before the next new one is made.
    for bank in banks:
        bank.allocate(layout.columns.scores.device)
        for split, place in zip(layout.splits, places, strict=True):
            if place[0] is not bank:
                continue
            for block in split.blocks:
                block.shape = shapes[block.index]
            former = split.bank
            active |= _resize_param(split, *place, hysteresis, updates, factor)
            waiting[id(former)] -= 1
            if not waiting[id(former)]:
                former.free()
    layout.banks[:] = banks
    layout.members[:] = [members_of(bank, layout.splits) for bank in banks]
    layout.topk_ratio = topk_ratio
    layout.version += 1
    return active


def _resize_param(
    split: SplitParam,
    bank: Bank,
    first: int,
    hysteresis: float,
    updates: Mapping[int, WindowUpdate],
    factor: float,
) -> dict[int, Tensor]:
    """Choose one parameter's columns, move its rows and cut its blocks anew."""
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
    split.columns.is_important.copy_(chosen)
    moves = RowMoves.of(split, chosen.cpu())
    _finish_windows(split, moves.leave.source, updates, factor)
    _move_rows(split, bank, first, moves)
    device = bank.master.device
    split.bank, split.bank_first = bank, first
    split.host = split.room.rows(slice(len(moves.deferred)))
    split.deferred_columns = moves.deferred.to(device)
    split.important_columns = moves.important.to(device)
    split.share_out()
    leaving = moves.leave.target.to(device)
    weight_OI = split.weight()
    fresh_OL = bank.master[first + leaving].t().to(weight_OI)
    weight_OI.index_copy_(1, split.important_columns[leaving], fresh_OL)
    takes_part = torch.ones(len(moves.deferred), dtype=torch.uint8)
    takes_part[moves.enter.target] = 0
    sizes = [block.shape.num_deferred for block in split.blocks]
    parts = takes_part.split(sizes)
    return {block.index: part for block, part in zip(split.blocks, parts, strict=True)}


def _finish_windows(
    split: SplitParam, rows: Tensor, updates: Mapping[int, WindowUpdate], factor: float
) -> None:
    """Step the host rows that leave by their share of their block's window, where they are."""
    leaves = torch.zeros(len(split.deferred_columns), dtype=torch.uint8)
    leaves[rows] = 1
    sizes = [len(block.host.master) for block in split.blocks]
    for block, active in zip(split.blocks, leaves.split(sizes), strict=True):
        update = updates.get(block.index)
        if update is not None and active.any():
            # What stays on the host needs its staging still: the uploads of this go nowhere.
            update.apply(block.host, factor, active, torch.empty_like(block.host.staging))


def _move_rows(split: SplitParam, bank: Bank, first: int, moves: RowMoves) -> None:
    """Bring every row to its place, one field after another."""
    last = first + len(moves.important)
    device = bank.master.device
    for name in ROW_STATE:
        room, former = getattr(split.room, name), getattr(split.bank, name)
        former = former[split.bank_first : split.bank_last]
        rows = getattr(bank, name)[first:last]
        rows[moves.keep.target.to(device)] = former[moves.keep.source.to(device)]
        rows[moves.leave.target.to(device)] = room[moves.leave.source].to(device)
        room[moves.stay.target] = room[moves.stay.source]
        room[moves.enter.target] = former[moves.enter.source.to(device)].cpu()
    for tensor in (*split.room.accumulators, split.room.staging):
        tensor[moves.stay.target] = tensor[moves.stay.source]
        tensor[moves.enter.target] = 0
