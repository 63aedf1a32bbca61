"""Saved state of a run: whole from one process, in shards that any number of ranks reads."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from experiments.training.parts.files.checkpoint import Checkpoint, save_checkpoint
from experiments.training.parts.files.shards import SHARDS, read_shards, read_whole, write_shards
from experiments.training.parts.ranks.ranks import Ranks
from zenflow.errors import CheckpointError
from zenflow.optimizer import ZenFlowAdamW

_DECIDING = {"master", "training_weight", "master_high"}
"""Names of a state's tensors of which an entry has one that decides the parameter's weights."""


def save_run(
    folder: Path,
    step: int,
    state: Mapping[str, Any],
    model: nn.Module,
    optimizer: ZenFlowAdamW,
    ranks: Ranks,
    *,
    keep_others: bool,
) -> None:
    """Write a checkpoint of a run; all ranks call it.

    Args:
        folder: Of the run's checkpoints.
        step: Steps taken.
        state: What is neither the model's nor the optimizer's.
        model: The model.
        optimizer: Its optimizer.
        ranks: Processes that share the run.
        keep_others: Whether earlier checkpoints stay.

    Raises:
        CheckpointError: It can't be written; every rank gets the error.
    """
    if not ranks.are_several:
        with optimizer.compact_states():
            states = optimizer.state_dict()
        whole = {**model_part(model, optimizer, states["state"]), "optimizer": states}
        save_checkpoint(folder, step, {**state, **whole}, keep_others=keep_others)
    elif ranks.is_first:
        _lead(folder, step, state, model, optimizer, ranks, keep_others=keep_others)
    else:
        _follow(model, optimizer, ranks)


def load_run(
    checkpoint: Checkpoint, model: nn.Module, optimizer: ZenFlowAdamW, ranks: Ranks
) -> None:
    """Take up a checkpoint's model and optimizer; all ranks call it.

    Raises:
        CheckpointError: It is of another model, configuration or controller.
    """
    if checkpoint.has_shards:
        read_shards(checkpoint.path / SHARDS, model, optimizer, ranks)
    elif ranks.are_several:
        read_whole(checkpoint.state, model, optimizer)
    else:
        # What is not there the optimizer writes.
        model.load_state_dict(checkpoint.state["model"], strict=False)
        optimizer.load_state_dict(checkpoint.state["optimizer"])


def model_part(
    model: nn.Module, optimizer: ZenFlowAdamW, entries: Mapping[int, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return a model's state without the weights that follow from the optimizer's.

    Args:
        model: The model.
        optimizer: Its optimizer.
        entries: Of the optimizer's state by the parameter's number. One with masters, or weights
            of training, decides the parameter's weights; float32 ones that the device updates
            whole have none.

    Returns:
        The rest as "model", and dtype and shape by name of what was left out as "model_left_out".
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    known = {id(params[number]) for number, entry in entries.items() if _DECIDING & entry.keys()}
    kept, left_out = {}, {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in known:
            left_out[name] = [str(tensor.dtype), list(tensor.shape)]
        else:
            kept[name] = tensor.detach()
            known.add(id(tensor))  # tied ones once
    return {"model": kept, "model_left_out": left_out}


def _lead(
    folder: Path,
    step: int,
    state: Mapping[str, Any],
    model: nn.Module,
    optimizer: ZenFlowAdamW,
    ranks: Ranks,
    *,
    keep_others: bool,
) -> None:
    """Write what is written once, and tell the other ranks when to write, and how it ended."""

    def shards(where: Path) -> Mapping[str, str]:
        ranks.of_first((where, None))
        return write_shards(where, model, optimizer, ranks)

    error: CheckpointError | None = None
    try:
        save_checkpoint(folder, step, state, keep_others=keep_others, shards=shards)
    except CheckpointError as raised:
        error = raised
    ranks.of_first((None, None if error is None else str(error)))
    if error is not None:
        raise error


def _follow(model: nn.Module, optimizer: ZenFlowAdamW, ranks: Ranks) -> None:
    """Write this rank's shards when the first rank says so.

    Raises:
        CheckpointError: What the first rank says of the whole.
    """
    nothing: tuple[Path | None, str | None] = (None, None)
    where, trouble = ranks.of_first(nothing)
    if where is not None:
        with suppress(OSError):  # the first rank tells
            write_shards(where, model, optimizer, ranks)
        _, trouble = ranks.of_first(nothing)
    if trouble is not None:
        raise CheckpointError(trouble)
