"""States on a drive in a checkpoint: a reference to the folder, or copies that are portable."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zenflow.columns.layout import SplitParam
from zenflow.drive import disk
from zenflow.errors import CheckpointError
from zenflow.report import readable
from zenflow.rule.sizes import whole_sectors

if TYPE_CHECKING:
    from zenflow.step.engine import Engine

DRIVE = "drive"
"""Key, in the engine's part of a state, of the checkpoint on a drive that the state refers to."""


def reference(engine: Engine) -> dict[str, Any]:
    """Make a checkpoint of a drained engine's states, and return the reference to it."""
    assert engine.drive is not None
    made, folder = engine.drive.commit(engine.step), engine.drive.folder
    there = {"run": folder.manifest.run, "checkpoint": made.number, "folder": str(folder.path)}
    return {DRIVE: there}


def check_drive(engine: Engine, saved: Mapping[str, Any], *, has_steps: bool) -> bool:
    """Return whether a state refers to this engine's drive, whose extents are whole then.

    Args:
        engine: The engine that would take the state up.
        saved: The engine's part of the state.
        has_steps: Whether the state has any step. A trainer loads a new optimizer's own one.

    Raises:
        CheckpointError: The state refers to another place, or to extents that are damaged; or it
            has states, and would overwrite a checkpoint.
    """
    there, lane = saved.get(DRIVE), engine.drive
    if there is None:
        if lane is not None and has_steps:
            lane.folder.claim()
        return False
    if lane is None:
        raise CheckpointError(
            f"the state refers to a checkpoint in {there['folder']}: make the optimizer with that "
            "state_dir, or save the state under optimizer.portable_states()"
        )
    lane.check(lane.folder.generation(there["run"], there["checkpoint"]))
    return True


def open_checkpoint(engine: Engine, saved: Mapping[str, Any]) -> bool:
    """Go on from the checkpoint that a state refers to, if it does, and return whether."""
    there = saved.get(DRIVE)
    if there is None:
        return False
    assert engine.drive is not None
    engine.drive.open(engine.drive.folder.generation(there["run"], there["checkpoint"]))
    return True


def portable_states(engine: Engine) -> dict[SplitParam, dict[str, Tensor]]:
    """Return copies of a drained engine's states by parameter, mapped from an unnamed file.

    Raises:
        CheckpointError: The drive has no room for the file.
    """
    assert engine.drive is not None
    folder, splits = engine.drive.folder, engine.layout.splits
    total = sum(_size(like) for split in splits for like in split.host.state.tensors())
    with tempfile.TemporaryFile(dir=folder.path) as file:
        try:
            disk.allocate(file.fileno(), max(1, total))
        except OSError as error:
            raise CheckpointError(
                f"{folder.path} has no room for the {readable(total)} of a portable state "
                f"({error}): free some, or save a state that refers to the folder"
            ) from error
        found, begin = {}, 0
        for split in splits:
            maps, copies = [], {}
            for name, like in split.host.state_by_name().items():
                if not like.numel():  # which can't be mapped
                    copies[name] = torch.empty(like.shape, dtype=like.dtype, device="cpu")
                    continue
                # A map for each: torch saves no memory that is seen as two types.
                maps.append(mmap.mmap(file.fileno(), _size(like), offset=begin))
                numbers = torch.frombuffer(maps[-1], dtype=like.dtype, count=like.numel())
                copies[name] = numbers.view(like.shape)
                begin += _size(like)
            for part, rows in split.host.passing():
                for copy, own in zip(copies.values(), rows.state.tensors(), strict=True):
                    copy[part].copy_(own)
            for pages in maps:  # the file has them now, and memory gives them up
                pages.flush()
                pages.madvise(mmap.MADV_DONTNEED)
            found[split] = copies
    folder.note_written(total)
    return found


def _size(like: Tensor) -> int:
    """Return the bytes of a tensor that takes no memory, in whole sectors."""
    return whole_sectors(like.numel() * like.itemsize)
