"""Names as people write them: matched without case and separators, or the nearest offered."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping


def fold(name: str) -> str:
    """Return a name without case and separators, by which names are compared.

    >>> fold("NVIDIA GeForce RTX-4090")
    'nvidiageforcertx4090'
    """
    return re.sub(r"[\s_-]+", "", name.casefold())


def nearest(name: str, known: Mapping[str, str]) -> str:
    """Return a sentence that offers the names nearest to an unknown one, or else all.

    Args:
        name: What was asked for.
        known: Names by their folded spellings.
    """
    near = difflib.get_close_matches(fold(name), known, n=8, cutoff=0.5)
    names = list(dict.fromkeys(known[key] for key in near))[:4]
    if names:
        return f"the nearest names are {', '.join(names)}"
    return f"known are {', '.join(dict.fromkeys(known.values()))}"
