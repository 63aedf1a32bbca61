"""An extension of griffe: examples in docstrings are shown as code, wherever they stand."""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"(?<=\n\n)(>>> .*?)(?=\n\n|\Z)", flags=re.DOTALL)


class Doctests(griffe.Extension):
    """Puts a fence around each example that no section ``Examples:`` holds."""

    def on_object(self, *, obj: griffe.Object, **others: Any) -> None:
        """Fence the examples of one object's docstring."""
        del others
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(docstring: str) -> str:
    """Return a docstring with its examples in fences."""
    return _EXAMPLE.sub(r"```pycon\n\1\n```", docstring)
