"""How tests start Python in a process of its own."""

import os
import sys
from pathlib import Path

LIGHT = Path(__file__).parent / "light"
"""Folder of what such a process loads first, so that it starts fast."""


def environment(**others: str) -> dict[str, str]:
    """Return the environment of a process that finds what this one finds, but no compiler.

    So it can't recompute activations by torch's `checkpoint`, which asks the compiler for more.
    """
    folders = [str(LIGHT), *(folder for folder in sys.path if folder)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders), **others}
