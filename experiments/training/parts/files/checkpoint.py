"""Checkpoints: written whole or not at all, tensors in safetensors, everything else in JSON.

A checkpoint is a directory ``step-N``. It is written under a temporary name, flushed to the disk
and renamed, so whatever bears such a name is whole, and the highest N is the newest. The one
before is renamed aside and removed last. Whatever stops a save - a full disk, a kill, a power
cut - the newest whole checkpoint is there to be found. Checksums say whether one still holds what
was written.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from experiments.output.files import free_space, fsync_folder, write_text
from experiments.training.parts.files.shards import SHARDS, check_shards, model_shapes
from experiments.training.parts.files.tensor_file import read_tensors, text_checksum, write_tensors
from experiments.training.parts.ranks.ranks import ALONE, Ranks
from zenflow.errors import CheckpointError

CHECKPOINTS = "checkpoint"
"""Folder of a run's checkpoints, in the run's own."""

FORMAT = 4
"""Raised when the meaning of an entry changes."""
_READ = (3, FORMAT)
"""Formats that are read: 3 had what follows from the rest as well."""
_TENSORS = "tensors.safetensors"
_STATE = "state.json"
_TEMPORARY = ".writing-"
_ASIDE = ".old-"
_NAME = re.compile(r"step-\d{8,}")
_DAMAGE = (OSError, ValueError, LookupError, TypeError, RecursionError, SafetensorError)
"""Errors of reading a file that is damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A loaded checkpoint."""

    path: Path
    step: int
    state: dict[str, Any]
    """Saved values, nested as before saving, tensors on the CPU; of shards the shapes alone."""
    has_shards: bool = False
    """Whether ranks have written the tensors of model and optimizer."""


def save_checkpoint(
    folder: Path,
    step: int,
    state: Mapping[str, Any],
    *,
    keep_others: bool = False,
    shards: Callable[[Path], Mapping[str, str]] | None = None,
) -> Path:
    """Write ``state`` as the checkpoint of ``step`` and return its directory.

    Args:
        folder: Holds the checkpoints of one run; made if missing.
        step: Optimizer steps taken.
        state: Nested dicts, lists and tuples of tensors, numbers, strings, bools and None.
        keep_others: Whether those that are there stay.
        shards: Writes what ranks have into a folder, and returns the hash of each file there.

    Raises:
        CheckpointError: It can't be written; what was there before still loads.
    """
    target = folder / f"step-{step:08d}"
    temporary = folder / f"{_TEMPORARY}{target.name}"
    tensors: dict[str, Tensor] = {}
    structure = flatten(state, "", tensors)
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fsync_folder(folder.parent)
        _remove_leftovers(folder)
        free = free_space(folder)
        if free is not None and free < num_bytes:
            raise OSError(f"{free / 1e6:,.2f} MB are free")
        temporary.mkdir()
        checksums = None if shards is None else dict(shards(temporary / SHARDS))
        _write(temporary, step, structure, tensors, checksums)
        if target.exists():
            _set_aside([target])
        temporary.rename(target)
        fsync_folder(folder)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"the checkpoint of step {step} can't be written to {folder} ({error}): the folder "
            f"must be writable and have {num_bytes / 1e6:,.2f} MB free beside the one before. "
            f"{_what_is_left(folder)}"
        ) from error
    with suppress(OSError):  # the next save tries again
        if not keep_others:
            _set_aside([path for path in checkpoints(folder) if path != target])
    _remove_leftovers(folder)
    return target


def load_checkpoint(folder: Path, ranks: Ranks = ALONE) -> Checkpoint:
    """Return the newest checkpoint below ``folder``, read and checked; ranks share the checking.

    Raises:
        CheckpointError: There is none, or it is not what was written.
    """
    found = checkpoints(folder)
    if not found:
        raise CheckpointError(
            f"there is no checkpoint in {folder}: the run ended before its first save, or was to "
            "make none (--no-checkpoint); start it again without --resume"
        )
    path, *older = found
    cause: Exception | None = None
    try:
        checkpoint = _read(path, ranks)
    except _DAMAGE as error:
        cause = error
    words = None if cause is None else f"{type(cause).__name__}: {cause}"
    for trouble in ranks.collect(words):
        if trouble is not None:
            raise CheckpointError(
                f"the checkpoint {path} can't be read ({trouble}): it has been "
                f"changed since it was written; {_remedy(path, older)}"
            ) from cause
    return checkpoint


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the directory of the newest checkpoint; None if there is none."""
    return next(iter(checkpoints(folder)), None)


def checkpoints(folder: Path) -> list[Path]:
    """Return the directories of all checkpoints, the newest first.

    One that was renamed aside counts where there is no other: a save of the same step was killed
    before its own rename, which is the only time when that can be.
    """
    found = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)]
    found = found or [path for path in folder.glob(f"{_ASIDE}*") if (path / _STATE).is_file()]
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)


def flatten(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return ``value`` as JSON, its tensors moved to ``tensors`` under their path as a name.

    Dicts become lists of pairs, so that integer keys stay integers.
    """
    if isinstance(value, Tensor):
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, Mapping):
        return {
            "dict": [
                [key, flatten(item, f"{name}/{key}" if name else str(key), tensors)]
                for key, item in value.items()
            ]
        }
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [flatten(item, f"{name}/{i}", tensors) for i, item in enumerate(value)]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a checkpoint holds tensors and plain values, but {name} is {type(value)}")


def unflatten(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that ``flatten`` was given."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: unflatten(item, tensors) for key, item in content}
    items = [unflatten(item, tensors) for item in content]
    return tuple(items) if kind == "tuple" else items


def _write(
    temporary: Path,
    step: int,
    structure: Any,
    tensors: Mapping[str, Tensor],
    shards: Mapping[str, str] | None,
) -> None:
    checksum = write_tensors(temporary / _TENSORS, tensors)
    content = {
        "step": step,
        "torch": torch.__version__,
        "tensors": checksum,
        "state": structure,
        **({} if shards is None else {SHARDS: shards}),
    }
    state = {
        "format": FORMAT,
        "checksum": text_checksum(json.dumps(content)),
        "content": content,
    }
    write_text(temporary / _STATE, json.dumps(state) + "\n")
    fsync_folder(temporary)


def _read(path: Path, ranks: Ranks = ALONE) -> Checkpoint:
    """Return a checkpoint, or raise one of ``_DAMAGE``."""
    saved = json.loads((path / _STATE).read_text(encoding="utf-8"))
    if saved["format"] not in _READ:
        raise CheckpointError(
            f"the checkpoint {path} is of format {saved['format']}, and this version of zenflow "
            f"reads {' and '.join(map(str, _READ))}: resume with the version that wrote it"
        )
    content = saved["content"]
    if text_checksum(json.dumps(content)) != saved["checksum"]:
        raise ValueError(f"the checksum of {_STATE} is not the one in it")
    tensors = read_tensors(path / _TENSORS, content["tensors"])
    state = unflatten(content["state"], tensors)
    if SHARDS in content:
        check_shards(path / SHARDS, content[SHARDS], ranks)
        state["model"] = model_shapes(path / SHARDS)
    return Checkpoint(path=path, step=content["step"], state=state, has_shards=SHARDS in content)


def _remedy(damaged: Path, older: Sequence[Path]) -> str:
    for path in older:
        try:
            _read(path)
        except (*_DAMAGE, CheckpointError):
            continue
        return (
            f"restore it from a copy, or remove {damaged} to go on from {path.name}, "
            "which is whole"
        )
    return "restore it from a copy or start again"


def _set_aside(paths: Sequence[Path]) -> None:
    """Take the name of a checkpoint from directories, which may then be removed bit by bit."""
    for path in paths:
        aside = path.with_name(_ASIDE + path.name.removeprefix(_ASIDE))
        if aside != path:
            path.rename(aside)


def _remove_leftovers(folder: Path) -> None:
    """Remove what a save, killed ones included, has left: all of it takes room."""
    left = list(folder.glob(f"{_TEMPORARY}*"))
    if any(_NAME.fullmatch(path.name) for path in folder.glob("step-*")):
        left += folder.glob(f"{_ASIDE}*")
    for path in left:
        shutil.rmtree(path, ignore_errors=True)


def _what_is_left(folder: Path) -> str:
    left = latest_checkpoint(folder)
    return f"{left.name} is whole and loads." if left else "There is no earlier checkpoint."
