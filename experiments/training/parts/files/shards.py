"""The tensors of a checkpoint that ranks write together, by ``torch.distributed.checkpoint``.

Any number of ranks reads them again. Each file's hash is in the checkpoint, as that of a run of
one process is. The library takes most of a second to load: only such checkpoints need it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from experiments.output.files import fsync_folder
from experiments.training.parts.files.tensor_file import file_checksum
from experiments.training.parts.ranks.ranks import Ranks
from zenflow.errors import CheckpointError

if TYPE_CHECKING:
    from zenflow.optimizer import ZenFlowAdamW

SHARDS = "shards"
"""Folder of the files in a checkpoint."""
_GROUPS = "param_groups"


def write_shards(
    folder: Path, model: nn.Module, optimizer: ZenFlowAdamW, ranks: Ranks
) -> dict[str, str]:
    """Write the tensors of model and optimizer, every rank its own, and return files' hashes.

    Raises:
        OSError: Some rank could not write; all ranks get it.
    """
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model_state, state = get_state_dict(model, optimizer)
    tensors = {"model": model_state, "optimizer": state}
    try:
        _dcp().save(tensors, checkpoint_id=folder, process_group=ranks.group)
    except _dcp().CheckpointException as error:
        causes = [str(cause) for cause, _ in error.failures.values()]
        raise OSError("; ".join(causes)) from error

    def checksums() -> dict[str, str]:
        if ranks.is_first:
            fsync_folder(folder)
        return {
            path.name: file_checksum(path)
            for path in folder.iterdir()
            if path.name.startswith(f"__{ranks.rank}_")
            or (ranks.is_first and path.suffix != ".distcp")
        }

    try:
        mine = ranks.together(checksums)
    except CheckpointError as error:
        raise OSError(str(error)) from error
    return {name: value for part in ranks.collect(mine) for name, value in part.items()}


def check_shards(folder: Path, checksums: Mapping[str, str], ranks: Ranks) -> None:
    """Check that this rank's share of the files holds what was written.

    Raises:
        OSError: A file can't be read.
        ValueError: It holds something else.
    """
    for name in sorted(checksums)[ranks.rank :: ranks.count]:
        found = file_checksum(folder / name)
        if found != checksums[name]:
            raise ValueError(f"the checksum of {name} is {found} in place of {checksums[name]}")


def model_shapes(folder: Path) -> dict[str, Tensor]:
    """Return the model's tensors as they were saved, by name, without their values."""
    saved = _dcp().FileSystemReader(folder).read_metadata().state_dict_metadata
    return {
        name.removeprefix("model."): torch.empty(
            entry.size, dtype=entry.properties.dtype, device="meta"
        )
        for name, entry in saved.items()
        if name.startswith("model.") and hasattr(entry, "size")
    }


def read_shards(folder: Path, model: nn.Module, optimizer: ZenFlowAdamW, ranks: Ranks) -> None:
    """Take up what ``write_shards`` wrote, on as many ranks or on others."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model_state, state = get_state_dict(model, optimizer)
    groups: dict[str, Any] = {"optimizer": {_GROUPS: state[_GROUPS]}}
    _load(groups, folder, ranks)
    optimizer.prepare_to_load(groups["optimizer"][_GROUPS])
    model_state, state = get_state_dict(model, optimizer)
    loaded: dict[str, Any] = {"model": model_state, "optimizer": state}
    _load(loaded, folder, ranks)
    set_state_dict(
        model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
    )


def read_whole(state: Mapping[str, Any], model: nn.Module, optimizer: ZenFlowAdamW) -> None:
    """Take up the checkpoint of a run of one process, on any number of ranks."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    # What is not there the optimizer writes.
    options = StateDictOptions(full_state_dict=True, strict=False)
    set_model_state_dict(model, state["model"], options=options)
    optimizer.load_state_dict(state["optimizer"])


def _load(state: dict[str, Any], folder: Path, ranks: Ranks) -> None:
    with warnings.catch_warnings():  # one process without a group is meant
        warnings.filterwarnings("ignore", message="torch.distributed is")
        _dcp().load(state, checkpoint_id=folder, process_group=ranks.group)


def _dcp() -> Any:
    """Return the library, whose names it does not export as type checkers want them."""
    return import_module("torch.distributed.checkpoint")
