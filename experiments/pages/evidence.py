"""What committed records say: their text, and numbers found in it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from experiments.output.provenance import RESULTS
from zenflow.errors import ConfigError

SUMMARIES = ("README.md", "table.txt")
"""Files of a record that say what it found, the first that is there."""


def folder_of(name: str, file: str = "*", results: Path = RESULTS) -> Path:
    """Return the newest committed record of a name that holds a file.

    Raises:
        ConfigError: There is none.
    """
    found = [p for p in results.glob(f"????-??-??_{name}_*") if any(p.glob(file))]
    if not found:
        raise ConfigError(
            f"{results} must have a record *_{name}_*/{file}, and has none: make it first"
        )
    return max(found)


def summary_of(folder: Path) -> str:
    """Return the text in which a record says what it found."""
    path = next(folder / name for name in SUMMARIES if (folder / name).is_file())
    return path.read_text(encoding="utf-8")


def json_of(path: Path) -> Any:
    """Return a record's JSON."""
    return json.loads(path.read_text(encoding="utf-8"))


def numbers(folder: Path, pattern: str) -> list[tuple[float, ...]]:
    """Return the numbers in every place of a record's text that a pattern finds.

    Raises:
        ConfigError: It finds none, so the record says something else now.
    """
    found = [
        tuple(float(group) for group in match.groups())
        for match in re.finditer(pattern, summary_of(folder))
    ]
    if not found:
        raise ConfigError(f"{folder} must say {pattern!r}, and does not: adapt what quotes it")
    return found
