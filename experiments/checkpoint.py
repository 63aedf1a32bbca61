"""Checkpoints: written whole or not at all, tensors in safetensors, everything else in JSON.

A checkpoint is a directory ``step-N``. It is written under a temporary name, flushed to the disk,
renamed, and only then does the file ``latest`` (itself replaced by a rename) name it; the one
before is removed last. Whatever stops a save - a full disk, a kill, a power cut - ``latest``
names a whole checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from experiments.records import fsync_folder, write_text
from zenflow.errors import CheckpointError

FORMAT = 1
_TENSORS = "tensors.safetensors"
_STATE = "state.json"
_LATEST = "latest"
_TEMPORARY = ".writing-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A loaded checkpoint."""

    path: Path
    step: int
    state: dict[str, Any]
    """What was saved, nested as it was, tensors on the CPU."""


def save_checkpoint(folder: Path, step: int, state: Mapping[str, Any]) -> Path:
    """Write ``state`` as the checkpoint of ``step`` and return its directory.

    Args:
        folder: Holds the checkpoints of one run; made if missing.
        step: Optimizer steps taken.
        state: Nested dicts, lists and tuples of tensors, numbers, strings, bools and None.

    Raises:
        CheckpointError: It can't be written; what was there before still loads.
    """
    target = folder / f"step-{step:08d}"
    temporary = folder / f"{_TEMPORARY}{target.name}-{os.getpid()}"
    tensors: dict[str, Tensor] = {}
    structure = flatten(state, "", tensors)
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder)
        _require_space(folder, num_bytes)
        temporary.mkdir()
        _write(temporary, step, structure, tensors)
        if target.exists():  # a save of the same step: the new one holds the same state
            shutil.rmtree(target)
        temporary.rename(target)
        fsync_folder(folder)
        write_text(folder / _LATEST, target.name + "\n")
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"the checkpoint of step {step} ({num_bytes / 1e6:.0f} MB) can't be written to "
            f"{folder} ({error}): free space there or choose another --out. "
            f"{_what_is_left(folder)}"
        ) from error
    for other in folder.glob("step-*"):
        if other != target:
            shutil.rmtree(other, ignore_errors=True)
    return target


def load_checkpoint(folder: Path) -> Checkpoint:
    """Return the newest whole checkpoint below ``folder``.

    Raises:
        CheckpointError: There is none, or it can't be read.
    """
    path = latest_checkpoint(folder)
    if path is None:
        raise CheckpointError(
            f"there is no checkpoint in {folder}: the run ended before its first save; start it "
            "again without --resume"
        )
    try:
        saved = json.loads((path / _STATE).read_text(encoding="utf-8"))
        _check_sizes(path, saved)
        tensors = load_file(path / _TENSORS)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(
            f"the checkpoint {path} can't be read ({type(error).__name__}: {error}): it has been "
            "changed since it was written; restore it from a copy or start again"
        ) from error
    return Checkpoint(path=path, step=saved["step"], state=unflatten(saved["state"], tensors))


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the directory that ``latest`` names, else the last whole one, else None."""
    try:
        named = folder / (folder / _LATEST).read_text(encoding="utf-8").strip()
        if (named / _STATE).is_file():
            return named
    except OSError:
        pass  # killed between the rename and the pointer: the directory itself is whole
    return max((path for path in folder.glob("step-*") if (path / _STATE).is_file()), default=None)


def flatten(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return ``value`` as JSON, its tensors moved to ``tensors`` under their path as a name.

    Dicts become lists of pairs, so that integer keys stay integers.
    """
    if isinstance(value, Tensor):
        tensors[name] = _owned(value, tensors)
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
    """Return what ``flatten`` was given."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: unflatten(item, tensors) for key, item in content}
    items = [unflatten(item, tensors) for item in content]
    return tuple(items) if kind == "tuple" else items


def _owned(tensor: Tensor, others: Mapping[str, Tensor]) -> Tensor:
    """Return the tensor on the CPU, contiguous, alone in its storage: safetensors' terms."""
    held = tensor.detach().to("cpu").contiguous()
    storage = held.untyped_storage()
    # Views of a common slab, and aliases that a tied model saves twice, get their own memory.
    alone = storage.nbytes() == held.numel() * held.element_size()
    aliased = any(
        other.untyped_storage().data_ptr() == storage.data_ptr() for other in others.values()
    )
    return held if alone and not aliased else held.clone()


def _write(temporary: Path, step: int, structure: Any, tensors: Mapping[str, Tensor]) -> None:
    save_file(dict(tensors), temporary / _TENSORS, metadata={"format": "pt"})
    state = {
        "format": FORMAT,
        "step": step,
        "torch": torch.__version__,
        "tensor_bytes": (temporary / _TENSORS).stat().st_size,
        "state": structure,
    }
    with open(temporary / _TENSORS, "rb") as file:
        os.fsync(file.fileno())  # data first: a rename must never name an unwritten file
    write_text(temporary / _STATE, json.dumps(state) + "\n")
    fsync_folder(temporary)


def _check_sizes(path: Path, saved: Mapping[str, Any]) -> None:
    if saved["format"] != FORMAT:
        raise ValueError(f"format {saved['format']} is not {FORMAT}: another version wrote it")
    size = (path / _TENSORS).stat().st_size
    if size != saved["tensor_bytes"]:
        raise ValueError(f"{_TENSORS} has {size} bytes in place of {saved['tensor_bytes']}")


def _require_space(folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise OSError(f"{free / 1e6:.0f} MB are free")


def _remove_leftovers(folder: Path) -> None:
    """Remove what killed saves left behind."""
    for path in folder.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(path, ignore_errors=True)


def _what_is_left(folder: Path) -> str:
    left = latest_checkpoint(folder)
    return f"{left.name} is whole and loads." if left else "There is no earlier checkpoint."
