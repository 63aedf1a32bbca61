"""File: the content of a DeepSpeed JSON, read as DeepSpeed reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zenflow.deepspeed.keys import is_comment
from zenflow.errors import ConfigError

if TYPE_CHECKING:
    from os import PathLike

_TEXT = r'(?P<text>"(?:\\.|[^"\\])*")'
_COMMENT = re.compile(rf"{_TEXT}|//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)
_LAST_COMMA = re.compile(rf"{_TEXT}|,(?=\s*[}}\]])")


def loaded(source: str | PathLike[str] | Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a configuration's content.

    Raises:
        ConfigError: The file can't be read, or holds no JSON object.
    """
    if isinstance(source, Mapping):
        return source
    try:
        content = json.loads(
            without_comments(Path(source).read_text(encoding="utf-8-sig")),
            object_pairs_hook=_without_repetition,
        )
    except OSError as error:
        raise ConfigError(f"{source} can't be read ({error.strerror}): check the path") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{source} must be JSON, but {error}: correct the file (comments and a comma behind "
            "the last key are passed over, as DeepSpeed does)"
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(f"{source} must hold a JSON object, got {type(content).__name__}")
    return content


def without_comments(text: str) -> str:
    """Return JSON without what DeepSpeed passes over: comments, commas behind a last value.

    DeepSpeed reads its files as Hjson (runtime/config.py), which has both. What stands in quotes
    stays, and so do the lines that an error counts.
    """
    bare = _COMMENT.sub(lambda found: found["text"] or "\n" * found[0].count("\n"), text)
    return _LAST_COMMA.sub(lambda found: found["text"] or "", bare)


def _without_repetition(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    names = [name for name, _ in pairs if not is_comment(name)]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} stands there twice")
    return content
