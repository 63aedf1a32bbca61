"""States on a drive: checks of the settings, the folder's begin, and the wear, said once."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from zenflow.columns.placement import fill_masters, state_kind
from zenflow.config import ZenFlowConfig
from zenflow.drive.extents import cut
from zenflow.drive.folder import StateFolder
from zenflow.drive.lane import DriveLane
from zenflow.host.ranks import num_ranks
from zenflow.report import readable
from zenflow.step.options import EngineOptions
from zenflow.surface.state.checks import signature
from zenflow.surface.state.host_format import depth_of

if TYPE_CHECKING:
    from contextlib import ExitStack

    from zenflow.columns.layout import Layout
    from zenflow.step.engine import Engine

_log = logging.getLogger(__name__)

MANY_STEPS = 1000
"""Number of steps whose wear is said before a run."""


def check_on_drive(config: ZenFlowConfig, *, is_shared: bool) -> None:
    """Refuse settings whose states can't be on a drive.

    Args:
        config: Settings of the update rule.
        is_shared: Whether ranks share parameters, or the host's work.

    Raises:
        ValueError: A setting breaks its rule; the message lists all that do.
    """
    rules = [
        (
            config.topk_ratio in (0, 1),
            f"topk_ratio={config.topk_ratio:g} lets columns change owner, whose states a drive "
            "can't move yet: use topk_ratio=0",
        ),
        (
            config.is_exact,
            f'update_rule="{config.update_rule}" passes over all states in every window: use '
            '"exact"',
        ),
        (
            not is_shared and num_ranks() == 1,
            "several processes train together, and a folder has the states of one: train in one "
            "process, or leave state_dir out",
        ),
    ]
    broken = [text for holds, text in rules if not holds]
    if broken:
        raise ValueError(f"state_dir: {'; '.join(broken)}")


def put_on_drive(
    layout: Layout, config: ZenFlowConfig, options: EngineOptions, ending: ExitStack
) -> DriveLane:
    """Open the folder for the states of all host rows, and start its lane.

    In a folder without a checkpoint the masters are the weights. A checkpoint stays as it is until
    it is loaded.

    Args:
        layout: Places of all parameters, changed in place.
        config: Settings of the update rule.
        options: How the engine runs.
        ending: Gets a callback that ends the lane.

    Raises:
        ValueError: The folder can't be used.
        CheckpointError: What the folder has is damaged.
        MemoryError: The host has no memory for the buffers.
    """
    assert options.state_dir is not None
    folder_path = Path(options.state_dir).expanduser().absolute()
    ranges, row = [], dict.fromkeys(layout.splits, 0)
    for block in layout.blocks:
        first = row[block.split]
        row[block.split] = first + block.shape.num_deferred
        ranges.append((first, row[block.split], block.split.num_host_rows))
    by_block = list(cut(ranges, state_kind(config)))
    extents = [extent for each in by_block for extent in each]
    places = xxhash.xxh3_64(repr([(r.first, r.last, r.num_elements) for r in extents]).encode())
    kind = {
        "parameters": signature(layout.places),
        "host_state": config.host_state,
        "cut of the states": places.hexdigest(),
    }
    lane = DriveLane(
        StateFolder(folder_path, kind, extents), extents, wait_timeout=options.wait_timeout
    )
    ending.callback(lane.close)
    for block, own in zip(layout.blocks, by_block, strict=True):
        block.split.host.extents = [*block.split.host.extents, *own]
    for split in layout.splits:
        split.host.drive = lane
        split.share_out()
    lane.start()
    if lane.folder.manifest.newest is None:
        for split in layout.splits:
            fill_masters(split)
    if not extents:
        _log.warning(
            "state_dir=%s: no parameter has states on the host, so that nothing goes there",
            folder_path,
        )
    return lane


def tell_of_wear(engine: Engine) -> None:
    """Log once how much the run writes, and how much of the drive's warranty that is."""
    lane = engine.drive
    if lane is None or not lane.extents:
        return
    interval = engine.calendar.knobs.update_interval
    passes = math.ceil(interval / depth_of(engine)) / interval
    each = passes * sum(extent.num_bytes for extent in lane.extents)
    written = MANY_STEPS * each
    text = (
        f"{lane.folder.path}: a step reads and writes about {readable(each)} each, and "
        f"{MANY_STEPS:,} steps write {readable(written)}"
    )
    if (tbw := engine.options.drive_tbw) is not None:
        share = written / (tbw * 1e12)
        before = lane.folder.all_written_bytes / (tbw * 1e12)
        text += f", {share:.2%} of the drive's warranted {tbw:g} TB; {before:.2%} so far"
    else:
        text += "; with drive_tbw a run says which share of the drive's warranty that is"
    _log.warning("%s", text)
