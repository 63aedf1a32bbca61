"""The commit that this code is of. Imports nothing else of the project: ``setup.py`` loads it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

BAKED = "commit.txt"
"""File of this package in a wheel and in a source archive: the commit they were built from."""
TOLD = "ZENFLOW_COMMIT"
"""Environment variable that tells the commit of a copy of the files, whose repository is not there
or is of another time."""


def commit() -> str | None:
    """Return the commit of this code, ``-dirty`` behind it if changed; None if nobody knows.

    A package knows the commit that it was built from. Elsewhere the environment variable
    ``ZENFLOW_COMMIT`` tells it. Without the variable a clone asks git, which must know the folder
    as the root of a repository: a virtual environment may lie in any other one.
    """
    folder = Path(__file__).resolve().parent
    try:
        return (folder / BAKED).read_text(encoding="utf-8").strip() or None
    except OSError:
        return os.environ.get(TOLD) or describe(folder.parent)


def describe(root: Path) -> str | None:
    """Return the commit of the repository whose root this is; None if it is no such root."""
    top = _git(root, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != root.resolve():
        return None
    return _git(root, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")


def _git(folder: Path, *words: str) -> str | None:
    try:
        # Git would else refresh its index in passing, and leave a lock behind on a full disk.
        done = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(folder), *words],
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
