"""Relative links of Markdown pages: where they are in a text, and what they mean."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

_FENCE = re.compile(r"^```.*?^```", flags=re.MULTILINE | re.DOTALL)
_TARGET = re.compile(r"(\]\()([^()\s]+)(\))")
_ELSEWHERE = re.compile(r"[a-z]+:|#")
RECORD_FILES = ("README.md", "table.txt", "record.json")
"""Files that stand for a record's folder where a folder can't be opened."""


def replaced(text: str, change: Callable[[str], str]) -> str:
    """Return Markdown with every relative link's target changed; code blocks stay as they are."""

    def link(match: re.Match[str]) -> str:
        target = match[2]
        return match[0] if _ELSEWHERE.match(target) else f"{match[1]}{change(target)}{match[3]}"

    parts, end = [], 0
    for fence in _FENCE.finditer(text):
        parts += [_TARGET.sub(link, text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, _TARGET.sub(link, text[end:])])


def targets(text: str) -> list[str]:
    """Return the targets of a page's relative links, as they are written."""
    found: list[str] = []

    def keep(target: str) -> str:
        found.append(target)
        return target

    replaced(text, keep)
    return found


def opened(path: Path) -> Path:
    """Return the file that stands for a folder; a file stands for itself."""
    if not path.is_dir():
        return path
    named = (path / name for name in RECORD_FILES if (path / name).is_file())
    return next(named, min(p for p in path.rglob("*") if p.is_file()))
