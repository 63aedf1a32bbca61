"""Disk space of a run's checkpoints, said before training begins."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from experiments.output.files import free_space
from experiments.training.parts.memory_check import memory_of_engine
from sim.memory.saved import checkpoint_bytes
from zenflow.errors import NoRoomError
from zenflow.report import readable

if TYPE_CHECKING:
    from experiments.training.parts.setup import RunSetup


def bytes_of_checkpoint(setup: RunSetup) -> int:
    """Return about how many bytes a checkpoint of a run takes, its frozen tensors included."""
    by_ranks = setup.ranks.are_several
    state = setup.model.state_dict(keep_vars=True).values()
    sizes = [(id(tensor), tensor.numel() * tensor.element_size()) for tensor in state]
    # Ranks write tied tensors under each of their names.
    written: int = sum(size for _, size in (sizes if by_ranks else dict(sizes).items()))
    on_drive = setup.settings.state_dir is not None  # which has its own room
    memory = memory_of_engine(setup.model, setup.config, on_drive=on_drive)
    states = checkpoint_bytes(memory, by_ranks=by_ranks)
    return states + written - setup.model_bytes


def check_space(setup: RunSetup, folder: Path, *, has_one: bool) -> str:
    """Refuse a run whose checkpoints can't fit, and return what they take in words.

    Args:
        setup: The run; all its ranks call this, and the first one's disk counts.
        folder: Its folder, which need not be there yet.
        has_one: Whether a checkpoint is there already, which the next one replaces.

    Raises:
        NoRoomError: There is no room for the one that is and the one that is being written.
    """
    if not setup.settings.checkpoint and has_one:
        return "checkpoint: the one that is there, and no other (--no-checkpoint)"
    if not setup.settings.checkpoint:
        return "checkpoint: none (--no-checkpoint), so that nothing of this run can be resumed"
    free = setup.ranks.of_first(free_space(folder))
    return check_room(bytes_of_checkpoint(setup), free, folder, has_one=has_one)


def check_room(size: int, free: int | None, folder: Path, *, has_one: bool) -> str:
    """Refuse checkpoints of a size that can't fit, and return what they take in words.

    Args:
        size: Bytes of one.
        free: Bytes that are free where they go; None where the system does not say.
        folder: The run's folder.
        has_one: Whether one is there already.

    Raises:
        NoRoomError: There is no room for the one that is and the one that is being written.
    """
    told = f"checkpoint {readable(size)} each, two while saving"
    if free is None:
        return f"{told}; {folder} does not say how much is free"
    if has_one and free < size:
        raise NoRoomError(
            f"a checkpoint of this run takes {readable(size)}, but {folder} has {readable(free)} "
            "free for the next one: free some, or go on with --no-checkpoint, which saves no more"
        )
    if not has_one and free < 2 * size:
        raise NoRoomError(
            f"a checkpoint of this run takes {readable(size)}, and a new one is written before "
            f"the old one goes, but {folder} has {readable(free)} free in place of "
            f"{readable(2 * size)}: give another --out, leave checkpoints out with "
            "--no-checkpoint, or train a smaller model"
        )
    return f"{told}; {readable(free)} free in {folder}"
