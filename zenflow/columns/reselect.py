"""Handover: columns of one block change owner, and take master, moments and step count along."""

from __future__ import annotations

import torch
from torch import Tensor

from zenflow.columns.host_rows import ROW_STATE, HostRows
from zenflow.columns.host_update import WindowUpdate
from zenflow.columns.layout import Block
from zenflow.rule.importance import select_columns


@torch.no_grad()
def hand_over(
    block: Block, update: WindowUpdate | None, factor: float, hysteresis: float
) -> Tensor:
    """Choose the block's important columns anew and move the difference.

    A column that leaves the host first gets its share of the window. One that comes to the host
    has no share of it: its gradients were applied on the device.

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
