"""Placement: decides where every parameter lives, once, when the optimizer is made."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from zenflow.columns.device_rows import Bank, NamedParam, Resident
from zenflow.columns.host_rows import HostRows, HostSlabs, RowShape
from zenflow.columns.host_shares import HostPart, HostShares
from zenflow.columns.layout import (
    Block,
    Bucket,
    ColumnVectors,
    Layout,
    RowVectors,
    SplitParam,
)
from zenflow.columns.local import local_of
from zenflow.columns.shards import Shards
from zenflow.config import ZenFlowConfig
from zenflow.device.base import AbstractDevice
from zenflow.drive.extents import RowState
from zenflow.host.compact import CompactState, FactoredCompactState
from zenflow.host.float_state import FactoredFloatState, FloatState
from zenflow.host_state import GROUP, GradientLink, gradient_width
from zenflow.rule.blocks import BlockShape, important_count, partition
from zenflow.rule.sizes import BANK_ELEMENTS, pieces


def why_resident(param: Tensor, config: ZenFlowConfig) -> str | None:
    """Return why a parameter stays on the device whole; None for one that is split.

    Kernels of more than two dimensions are viewed as matrices, which takes contiguous memory: one
    in channels-last order stays on the device. A sharded parameter goes by its whole size, so that
    any number of ranks decides alike.
    """
    if config.topk_ratio == 1:
        return "k = 1"
    if param.ndim < 2:
        return "fewer than two dimensions"
    if param.numel() < max(1, config.min_split_elements):
        return f"fewer elements than min_split_elements={config.min_split_elements:,}"
    if param.ndim > 2 and not local_of(param).is_contiguous():
        return "a kernel in memory that is not contiguous"
    return None


def is_split(param: Tensor, config: ZenFlowConfig) -> bool:
    """Whether a parameter is split between device and host; all others are resident."""
    return why_resident(param, config) is None


def build_layout(
    params: Sequence[NamedParam],
    config: ZenFlowConfig,
    device: AbstractDevice,
    *,
    least_topk_ratio: float,
    largest_interval: int,
    shards: Shards,
    shares: HostShares,
    on_drive: bool = False,
) -> Layout:
    """Place all parameters on device and host, and allocate their state; masters are the weights.

    Blocks are cut by the parameters' whole sizes: with any number of ranks they are the same.

    Args:
        params: Every trainable parameter.
        config: The update rule's settings.
        device: Device that the parameters are on.
        least_topk_ratio: Smallest k for which the host has memory, at most the config's.
        largest_interval: S for which blocks are cut fine enough.
        shards: Ranks that the parameters' rows are spread over.
        shares: Ranks whose hosts share the work on the parameters' rows.
        on_drive: Whether the host's states go to a drive, where somebody else puts them.
    """
    to_split = [named for named in params if is_split(named.param, config)]
    residents = [
        Resident.of(named.param, named.name, named.group)
        for named in params
        if not is_split(named.param, config)
    ]
    shapes = partition(
        [_matrix_shape(named.param) for named in to_split],
        topk_ratio=config.topk_ratio,
        update_interval=largest_interval,
        block_elements=config.block_elements,
        pages=[-1 if named.page is None else named.page.index for named in to_split],
    )
    most_deferred = _deferred_columns(shapes, len(to_split), least_topk_ratio)
    parts = [shares.part_of(named) for named in to_split]
    _check_cuts(to_split, config, shards, shares)
    link = config.gradient_link
    rooms = [_row_shape(*each, link) for each in zip(to_split, parts, most_deferred, strict=True)]
    slabs = HostSlabs(device, rooms, state_kind(config), on_drive=on_drive)
    columns, rows = _vectors(to_split, device.torch_device, has_rows=config.is_exact)
    splits, banks = _make_splits(
        to_split,
        _deferred_columns(shapes, len(to_split), config.topk_ratio),
        parts,
        [slabs.take(room) for room in rooms],
        [gradient_width(link, part.most) for part in parts],
        columns,
        rows,
        has_second=not config.is_factored,
    )
    blocks = _make_blocks(shapes, splits)
    for split in () if on_drive else splits:
        fill_masters(split)
    return Layout(
        splits=splits,
        residents=residents,
        banks=banks,
        members=[members_of(bank, splits) for bank in banks],
        blocks=blocks,
        buckets=_make_buckets(splits, columns, rows),
        slabs=slabs,
        columns=columns,
        rows=rows,
        topk_ratio=config.topk_ratio,
        least_topk_ratio=least_topk_ratio,
        shards=shards,
        shares=shares,
    )


def state_kind(config: ZenFlowConfig) -> type[RowState]:
    """Return the format of the host's states."""
    if config.is_factored:
        return FactoredCompactState if config.is_compact else FactoredFloatState
    return CompactState if config.is_compact else FloatState


def _row_shape(
    named: NamedParam, part: HostPart, num_columns: int, link: GradientLink
) -> RowShape:
    """Return the host rows to allocate for a parameter that defers so many columns at most."""
    return RowShape(
        num_columns=num_columns,
        num_rows=part.num_rows,
        gradient_width=gradient_width(link, part.num_rows),
        dtype=named.param.dtype if link == "model" else torch.uint8,
        whole_rows=_matrix_shape(named.param)[0],
        first_row=part.whole_first,
    )


def _check_cuts(
    to_split: Sequence[NamedParam], config: ZenFlowConfig, shards: Shards, shares: HostShares
) -> None:
    """Refuse ranks that would cut a group of rows with a common exponent in two.

    Raises:
        ValueError: A parameter's rows are cut at another place than a multiple of 64.
    """
    asked = [
        f'{name}="{value}"'
        for name, value, plain in (
            ("host_state", config.host_state, "float32"),
            ("gradient_link", config.gradient_link, "model"),
        )
        if value != plain
    ]
    if not asked:
        return
    group = shards.group or shares.group
    size = 1 if group is None else group.size()
    for named in to_split:
        whole = named.param.shape[0]
        most = -(-whole // size)
        if most < whole and most % GROUP:
            raise ValueError(
                f"{asked[0]} needs a multiple of {GROUP} rows of a parameter on each of {size} "
                f"ranks, but {named.name} has {whole:,} rows, {most:,} on a rank: leave "
                f"{' and '.join(asked)} out, or use another number of ranks"
            )


def _vectors(
    to_split: Sequence[NamedParam], device: torch.device, *, has_rows: bool
) -> tuple[ColumnVectors, RowVectors]:
    """Return the vectors over all columns and rows, zeroed."""
    num_columns = sum(_matrix_shape(named.param)[1] for named in to_split)
    energies, scores, mean_squares, fresh_factors = (
        torch.zeros(num_columns, dtype=torch.float32, device=device) for _ in range(4)
    )
    is_important = torch.zeros(num_columns, dtype=torch.bool, device=device)
    host_rows = torch.full((num_columns,), -1, dtype=torch.int32, device=device)
    columns = ColumnVectors(energies, scores, is_important, mean_squares, fresh_factors, host_rows)
    num_rows = sum(named.data.shape[0] for named in to_split) if has_rows else 0
    of_rows = (torch.zeros(num_rows, dtype=torch.float32, device=device) for _ in range(3))
    rows = RowVectors(*of_rows)
    return columns, rows


def _deferred_columns(
    shapes: Sequence[BlockShape], num_matrices: int, topk_ratio: float
) -> list[int]:
    """Return the number of deferred columns of each matrix at a ratio k."""
    counts = [0] * num_matrices
    for shape in shapes:
        counts[shape.matrix] += shape.num_columns - important_count(topk_ratio, shape.num_columns)
    return counts


def _matrix_shape(param: Tensor) -> tuple[int, int]:
    """Return the parameter's rows on all ranks, and its columns."""
    return param.shape[0], param.numel() // param.shape[0]


def _make_splits(
    to_split: Sequence[NamedParam],
    num_deferred: Sequence[int],
    parts: Sequence[HostPart],
    rooms: Sequence[HostRows],
    slot_widths: Sequence[int],
    columns: ColumnVectors,
    rows: RowVectors,
    *,
    has_second: bool,
) -> tuple[list[SplitParam], list[Bank]]:
    """Give every split parameter its rows on the host, in a bank, and in the column vectors."""
    shapes = [_matrix_shape(named.param) for named in to_split]
    num_important = [
        width - deferred for (_, width), deferred in zip(shapes, num_deferred, strict=True)
    ]
    banks, places = assign_banks(to_split, num_important, has_second=has_second)
    splits = []
    first = first_row = 0
    device = columns.energies.device
    for index, named in enumerate(to_split):
        whole_rows, num_columns = shapes[index]
        num_rows = named.data.shape[0]
        bank, bank_first = places[index]
        split = SplitParam(
            param=named.param,
            name=named.name,
            group=named.group,
            num_rows=num_rows,
            whole_rows=whole_rows,
            part=parts[index],
            num_columns=num_columns,
            bank=bank,
            bank_first=bank_first,
            slab_rows=rooms[index],
            slot_width=slot_widths[index],
            host=rooms[index].rows(slice(num_deferred[index])),
            deferred_columns=torch.empty(num_deferred[index], dtype=torch.int64, device=device),
            important_columns=torch.empty(num_important[index], dtype=torch.int64, device=device),
            columns=columns.part(first, first + num_columns),
            rows=rows.part(first_row, first_row + num_rows),
        )
        splits.append(split)
        first += num_columns
        first_row += num_rows
    for bank in banks:
        bank.allocate(device)
    return splits, banks


def assign_banks(
    params: Sequence[NamedParam], num_important: Sequence[int], *, has_second: bool = True
) -> tuple[list[Bank], list[tuple[Bank, int]]]:
    """Return banks without memory, and each parameter's bank and first row in it.

    Args:
        params: Parameters; those of one group, column length and dtype may share a bank.
        num_important: Columns of each that the device owns.
        has_second: Whether columns have second moments.
    """
    banks: list[Bank] = []
    places = []
    current: dict[tuple[int, int, torch.dtype], Bank] = {}
    for named, count in zip(params, num_important, strict=True):
        group, num_rows = named.group, named.data.shape[0]
        kind = (group, num_rows, named.param.dtype)
        bank = current.get(kind)
        if bank is None or (bank.num_columns + count) * num_rows > BANK_ELEMENTS:
            bank = current[kind] = Bank(group, num_rows, has_second=has_second)
            banks.append(bank)
        places.append((bank, bank.num_columns))
        bank.num_columns += count
    return banks, places


def members_of(bank: Bank, splits: Sequence[SplitParam]) -> list[SplitParam]:
    """Return the parameters with columns in the bank, in the order of their rows."""
    return [split for split in splits if split.bank is bank and len(split.important_columns)]


def _make_blocks(shapes: Sequence[BlockShape], splits: Sequence[SplitParam]) -> list[Block]:
    """Cut all blocks out of their parameters.

    Important columns are evenly spaced until a gradient is known.
    """
    blocks = []
    for index, shape in enumerate(shapes):
        split = splits[shape.matrix]
        columns = split.columns.part(shape.first, shape.first + shape.num_columns)
        block = Block(index=index, shape=shape, split=split, columns=columns)
        split.blocks.append(block)  # a parameter's blocks come with ascending columns
        blocks.append(block)
    for split in splits:
        split.share_out()
    for split in splits:
        share_evenly(split)
    return blocks


def share_evenly(split: SplitParam) -> None:
    """Make evenly spaced columns of each block the important ones."""
    for block in split.blocks:
        _share_evenly(block)
    split.note_owners()


def _share_evenly(block: Block) -> None:
    shape = block.shape
    is_important = torch.zeros(shape.num_columns, dtype=torch.bool, device="cpu")
    ranks = range(shape.num_important)
    is_important[[rank * shape.num_columns // shape.num_important for rank in ranks]] = True
    block.important_columns.copy_(is_important.nonzero().squeeze(1) + shape.first)
    block.deferred_columns.copy_((~is_important).nonzero().squeeze(1) + shape.first)


@torch.no_grad()
def fill_masters(split: SplitParam) -> None:
    """Copy the weights into all masters."""
    with split.held():
        _fill_masters(split)


def _fill_masters(split: SplitParam) -> None:
    weight_IO, masters_KO = split.weight().t(), split.important_masters
    for part in pieces(len(masters_KO), masters_KO[:1].nbytes):
        masters_KO[part] = weight_IO[split.important_columns[part]]
    for columns, rows in split.host_pieces(changes=True):
        own_IO, indices = columns.turned(split.part.of(split.weight()))
        rows.set_weights(own_IO[indices])


def _make_buckets(
    splits: list[SplitParam], columns: ColumnVectors, rows: RowVectors
) -> list[Bucket]:
    """Put parameters, in backward order, into the buckets that their blocks name."""
    buckets: list[Bucket] = []
    last, last_row = len(columns.energies), len(rows.energies)
    for index, run in groupby(reversed(splits), lambda split: split.blocks[0].shape.bucket):
        members = list(run)
        for split in members:
            split.bucket = index
        first = last - sum(split.num_columns for split in members)
        first_row = last_row - sum(len(split.rows.energies) for split in members)
        buckets.append(
            Bucket(
                index=index,
                splits=members,
                blocks=[block for split in members for block in split.blocks],
                columns=columns.part(first, last),
                rows=rows.part(first_row, last_row),
            )
        )
        last, last_row = first, first_row
    return buckets
