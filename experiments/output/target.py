"""Targets of commands: files and folders that are tried before work starts, not after it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from zenflow.errors import ConfigError

PICTURES = (
    ".png", ".svg", ".pdf", ".jpg", ".jpeg", ".webp", ".tif", ".tiff", ".eps", ".svgz",
)  # fmt: skip
"""Ends of the names of pictures that can be drawn."""


def check_file(path: Path, suffixes: Sequence[str] = ()) -> None:
    """Refuse a file that could not be written.

    Args:
        path: The file; what is there already is left as it is.
        suffixes: Ends that its name may have; none: any.

    Raises:
        ConfigError: Its name has another end, it is a directory or a device, or its folder is not
            there or can't be written.
    """
    if os.path.isdir(path):
        raise ConfigError(f"must be a file, but {path} is a directory: name a file in it")
    if suffixes and path.suffix.lower() not in suffixes:
        *others, last = suffixes
        raise ConfigError(
            f"must end in {', '.join(others)} or {last}, but is {path}: name another"
        )
    if os.path.exists(path) and not os.path.isfile(path):
        raise ConfigError(f"must be a file, but {path} is none: name another file")
    folder = path.absolute().parent
    if not os.path.isdir(folder):
        raise ConfigError(
            f"must be in a folder that exists, but {path.parent} is none: make it, or name another"
        )
    _try(folder, path)


def check_folder(path: Path) -> None:
    """Refuse a folder that could not be made or written.

    Args:
        path: The folder, which need not be there yet.

    Raises:
        ConfigError: It or what is above it is a file, or can't be written.
    """
    place = path.absolute()
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    if not os.path.isdir(place):
        raise ConfigError(f"must be a folder, but {place} is a file: name another folder")
    _try(place, path)


def _try(folder: Path, target: Path) -> None:
    """Make a file as drafts are named, and remove it."""
    draft = folder / f".{target.name}.{os.getpid()}.draft"
    try:
        with draft.open("xb"):
            draft.unlink()
    except OSError as error:
        raise ConfigError(
            f"{target} can't be written ({error.strerror or error}): name another place"
        ) from error
