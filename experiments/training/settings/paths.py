"""Paths among a run's settings: told from names of the hub, and made absolute."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.training.settings.sizes import MODEL_SIZES
from zenflow.errors import ConfigError

_HUB_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?(:[\w.-]+)?")
"""owner/name or name, and of a data set the configuration behind a colon."""
_FILE_SUFFIX = re.compile(r"\.[a-z]{1,7}", re.IGNORECASE)
"""Suffix of a file's name; a hub name such as OpenHermes-2.5 ends in a number."""


def check_named(name: str | None, flag: str) -> None:
    """Refuse a path that is not there, rather than look for it on the hub.

    A path is what can't be a hub name, what ends like a file, or what lies in a directory that
    is there.

    Raises:
        ConfigError: It is not there; the message has the nearest name in its directory.
    """
    if name is None:
        return
    path = Path(name).expanduser()
    if path.exists():
        return
    in_folder = "/" in name and path.parent.is_dir()
    if in_folder or _FILE_SUFFIX.fullmatch(path.suffix) or not _HUB_NAME.fullmatch(name):
        raise missing_path(name, flag)


def missing_path(name: str, flag: str) -> ConfigError:
    """Return the error of a path that is not there, with the nearest name in its directory."""
    path = Path(name).expanduser()
    folder = path.parent
    if not folder.is_dir():
        return ConfigError(f"{flag} {name}: there is no directory {folder}: check the path")
    near = difflib.get_close_matches(path.name, [item.name for item in folder.iterdir()], n=1)
    hint = f"did you mean {folder / near[0]}?" if near else "check the path"
    return ConfigError(f"{flag} {name}: {folder.resolve()} has no {path.name}: {hint}")


def located(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with absolute paths, so that their run resumes from any directory."""
    made = dict(values)
    for key in ("data", "eval_data", "model", "profile", "state_dir"):
        name = made.get(key)
        if not isinstance(name, str):
            continue
        own = "own:" if key == "model" and name.startswith("own:") else ""
        path = Path(name.removeprefix(own)).expanduser()
        is_size = key == "model" and name.removeprefix(own) in MODEL_SIZES
        if path.exists() and not is_size:
            made[key] = f"{own}{path.resolve()}"
    return made
