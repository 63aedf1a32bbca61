"""Another ratio k in mid-run: every block gets another number of important columns.

Rows move then too: host rows within their parameter's slab, one parameter at a time, and device
banks are made anew one after another.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zenflow.columns.device_rows import Bank
from zenflow.columns.handover import write_newer
from zenflow.columns.host_rows import ROW_STATE, MovingColumns
from zenflow.columns.host_shares import HostShares
from zenflow.columns.layout import Layout, SplitParam
from zenflow.columns.placement import assign_banks, members_of
from zenflow.rule.blocks import important_count
from zenflow.rule.importance import select_columns


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
    write_newer(layout.splits)
    shapes = {
        block.index: replace(
            block.shape, num_important=important_count(topk_ratio, block.shape.num_columns)
        )
        for block in layout.blocks
    }
    counts = [sum(shapes[b.index].num_important for b in split.blocks) for split in layout.splits]
    has_second = all(bank.has_second for bank in layout.banks)
    banks, places = assign_banks(layout.splits, counts, has_second=has_second)
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
        if name not in ("step", *bank.left_out):  # these every rank has whole
            (values,) = shares.gather([values], [split.num_rows])
            former = split.own_part(former)
        rows[moves.leave.target.to(device)] = values
        entering[name] = former[moves.enter.source.to(device)].cpu()
    split.slab_rows.move(moves.stay.target, moves.stay.source)
    split.slab_rows.put(moves.enter.target, MovingColumns(**entering))
