"""Files that are replaced by a rename, so that a reader never sees half of one."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from experiments.output.target import naming


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a draft that takes the place of ``path``, unless writing it fails."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with naming(path):
            yield draft
            draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` by a file with this text, on the disk when the call returns."""
    with replacing(path) as draft, open(draft, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fsync_folder(path.parent)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace ``path`` by ``value`` as strict JSON (a number that is not finite becomes null)."""
    write_text(path, json.dumps(strict(value), indent=2, allow_nan=False) + "\n")


def fsync_folder(folder: Path) -> None:
    """Flush a directory's entries, so that a rename in it survives a power cut."""
    if os.name == "nt":
        return  # Windows opens no directories; its rename is as durable as it gets
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def strict(value: Any) -> Any:
    """Return a value as strict JSON has it: None for numbers that are not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    return value
