"""Entry point of the installed command ``zenflow``, from any working directory.

The command's code is in the packages ``experiments``, ``autotune`` and ``sim`` beside this one. A
project may have folders of those names too, and with ``PYTHONPATH=.`` they would be found first.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

_PACKAGES = ("evidence", "experiments", "autotune", "sim")


def own_packages_first(path: Sequence[str], root: Path) -> list[str]:
    """Return an import path on which this project's packages come before others of their names.

    Entries that hold such a name move behind ``root``; all others keep their places.

    Args:
        path: Entries as of ``sys.path``.
        root: The directory that holds this project's packages.
    """
    own = [entry for entry in path if Path(entry).resolve() == root]
    others = [
        entry
        for entry in path
        if entry not in own
        and any(
            Path(entry, name).is_dir() or Path(entry, f"{name}.py").is_file() for name in _PACKAGES
        )
    ]
    kept = [entry for entry in path if entry not in others]
    return [*kept, *([] if own else [str(root)]), *others]


def main() -> None:
    """Run the command line."""
    # The path itself is changed, not only what is imported: worker processes are given it.
    sys.path[:] = own_packages_first(sys.path, Path(__file__).resolve().parent.parent)
    # By name: zenflow imports no package above it. This module lies here all the same, for the
    # name of its package is the only one of ours that a user's project can't have as well.
    import_module("experiments.cli").main()
