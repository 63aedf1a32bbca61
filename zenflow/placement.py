"""Placement: decides where every parameter lives, once, when the optimizer is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zenflow.blocks import BlockShape, initial_important, partition
from zenflow.config import ZenFlowConfig
from zenflow.device import AbstractDevice
from zenflow.device_store import BANK_ELEMENTS, Bank, Resident
from zenflow.host_store import HostSlabs
from zenflow.layout import Block, Bucket, ColumnVectors, Layout, SplitParam

MAX_BUCKET_ELEMENTS = 1 << 18
"""Small parameters travel together until a bucket has this many elements: a copy and a host task
cost tens of microseconds whatever their size."""

MIN_BUCKET_ELEMENTS = 1 << 14
BUCKETS_AT_LEAST = 32
"""A small model is cut finer, so that copies overlap backward there too."""


@dataclass(frozen=True, slots=True)
class NamedParam:
    """A parameter with the group it is in and a name for messages."""

    param: Tensor
    name: str
    group: int


def is_split(param: Tensor, config: ZenFlowConfig) -> bool:
    """Whether a parameter's columns are shared out; all others are resident.

    Kernels of more than two dimensions are viewed as matrices, which takes contiguous memory: one
    in channels-last order stays on the device.
    """
    return (
        config.topk_ratio < 1
        and param.ndim >= 2
        and param.numel() >= max(1, config.min_split_elements)
        and (param.ndim == 2 or param.is_contiguous())
    )


def build_layout(
    params: Sequence[NamedParam],
    config: ZenFlowConfig,
    device: AbstractDevice,
    *,
    num_accumulators: int,
) -> Layout:
    """Share out all parameters and allocate their state; masters start as the weights are."""
    split_params = [named for named in params if is_split(named.param, config)]
    residents = [
        Resident.of(named.param, named.name, named.group)
        for named in params
        if not is_split(named.param, config)
    ]
    sizes = [
        (named.param.shape[0], named.param.numel() // named.param.shape[0])
        for named in split_params
    ]
    shapes = partition(
        sizes,
        topk_ratio=config.topk_ratio,
        update_interval=config.update_interval,
        block_elements=config.block_elements,
    )
    num_deferred = [0] * len(sizes)
    for shape in shapes:
        num_deferred[shape.matrix] += shape.num_deferred
    slabs = HostSlabs(
        device,
        [
            (d, rows, n.param.dtype)
            for d, (rows, _), n in zip(num_deferred, sizes, split_params, strict=True)
        ],
        num_accumulators,
    )
    total_columns = sum(columns for _, columns in sizes)
    columns_of_all = ColumnVectors.zeros(total_columns, device.torch_device)
    banks: list[Bank] = []
    find_bank = _bank_finder(banks)
    splits = []
    offset = 0
    for named, (rows, columns), deferred in zip(split_params, sizes, num_deferred, strict=True):
        important = columns - deferred
        bank = find_bank(named.group, rows, important)
        splits.append(
            SplitParam(
                param=named.param,
                name=named.name,
                group=named.group,
                num_rows=rows,
                num_columns=columns,
                bank=bank,
                bank_first=bank.num_columns,
                host=slabs.take(deferred, rows, named.param.dtype),
                deferred_columns=torch.empty(
                    deferred, dtype=torch.int64, device=device.torch_device
                ),
                important_columns=torch.empty(
                    important, dtype=torch.int64, device=device.torch_device
                ),
                columns=columns_of_all.part(offset, offset + columns),
            )
        )
        bank.num_columns += important
        if important:
            bank.members.append(splits[-1])
        offset += columns
    for bank in banks:
        bank.allocate(device.torch_device)
    blocks = [
        _make_block(index, shape, splits[shape.matrix]) for index, shape in enumerate(shapes)
    ]
    for split in splits:
        _fill_masters(split)
    return Layout(splits, residents, banks, blocks, _make_buckets(splits), slabs, columns_of_all)


def _indices(count: int, device: AbstractDevice) -> Tensor:
    return torch.empty(count, dtype=torch.int64, device=device.torch_device)


def _bank_finder(banks: list[Bank]) -> Callable[[int, int, int], Bank]:
    """Return a function that gives the bank for a group's columns of one length."""
    current: dict[tuple[int, int], Bank] = {}

    def find(group: int, num_rows: int, num_columns: int) -> Bank:
        bank = current.get((group, num_rows))
        if bank is None or (bank.num_columns + num_columns) * num_rows > BANK_ELEMENTS:
            bank = Bank(group=group, num_rows=num_rows)
            current[group, num_rows] = bank
            banks.append(bank)
        return bank

    return find


def _make_block(index: int, shape: BlockShape, split: SplitParam) -> Block:
    """Cut a block out of its parameter; a parameter's blocks come with ascending columns."""
    row = sum(block.shape.num_deferred for block in split.blocks)
    rank = sum(block.shape.num_important for block in split.blocks)
    block = Block(
        index=index,
        shape=shape,
        split=split,
        host=split.host.rows(row, row + shape.num_deferred),
        deferred_columns=split.deferred_columns[row : row + shape.num_deferred],
        important_columns=split.important_columns[rank : rank + shape.num_important],
        bank_first=split.bank_first + rank,
        columns=split.columns.part(shape.first, shape.first + shape.num_columns),
    )
    is_important = torch.zeros(shape.num_columns, dtype=torch.bool)
    is_important[[column - shape.first for column in initial_important(shape)]] = True
    block.columns.is_important.copy_(is_important)
    block.important_columns.copy_(is_important.nonzero().squeeze(1) + shape.first)
    block.deferred_columns.copy_((~is_important).nonzero().squeeze(1) + shape.first)
    split.blocks.append(block)
    return block


@torch.no_grad()
def _fill_masters(split: SplitParam) -> None:
    """Let the masters be the weights as they are."""
    weight_IO = split.weight().t()
    last = split.bank_first + len(split.important_columns)
    split.bank.master[split.bank_first : last] = weight_IO[split.important_columns].float()
    for block in split.blocks:
        block.host.master.copy_(weight_IO[block.deferred_columns])


def _make_buckets(splits: list[SplitParam]) -> list[Bucket]:
    """Group parameters in backward order."""
    buckets: list[Bucket] = []
    total = sum(split.num_rows * split.num_columns for split in splits)
    enough = min(MAX_BUCKET_ELEMENTS, max(MIN_BUCKET_ELEMENTS, total // BUCKETS_AT_LEAST))
    filled = enough
    for split in reversed(splits):
        if filled >= enough:
            buckets.append(Bucket(index=len(buckets)))
            filled = 0
        buckets[-1].splits.append(split)
        split.bucket = buckets[-1].index
        filled += split.num_rows * split.num_columns
    return buckets
