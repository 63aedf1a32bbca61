"""Kinds of files, by their names and first bytes: text, or something else.

Does not import torch.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_HEAD_BYTES = 1 << 16
"""First bytes of a file that are looked at."""
_ROWS: Mapping[str, tuple[str, str]] = {
    ".json": ("JSON", "json"),
    ".jsonl": ("JSON lines", "json"),
    ".ndjson": ("JSON lines", "json"),
    ".csv": ("CSV", "csv"),
    ".parquet": ("Parquet", "parquet"),
    ".arrow": ("Arrow", "arrow"),
    ".feather": ("Arrow", "arrow"),
}
"""Suffixes of rows: what such a file is called, and its builder of ``datasets.load_dataset``."""
_PACKED: Mapping[str, str] = {
    ".gz": "gzip", ".tgz": "gzip", ".zst": "zstandard", ".bz2": "bzip2", ".xz": "xz",
    ".zip": "zip", ".tar": "tar", ".7z": "7z",
}  # fmt: skip
_DOCUMENTS: Mapping[str, str] = {
    ".pdf": "a PDF", ".docx": "a Word document", ".doc": "a Word document",
    ".xlsx": "a spreadsheet", ".xls": "a spreadsheet", ".ods": "a spreadsheet",
    ".epub": "an e-book", ".sqlite": "a database", ".db": "a database", ".pkl": "a pickle",
    ".pickle": "a pickle",
}  # fmt: skip
_FIRST_BYTES: Mapping[bytes, str] = {
    b"PAR1": ".parquet", b"ARROW1": ".arrow", b"FEA1": ".feather", b"\x1f\x8b": ".gz",
    b"\x28\xb5\x2f\xfd": ".zst", b"BZh91AY&SY": ".bz2", b"\xfd7zXZ\0": ".xz",
    b"PK\x03\x04": ".zip", b"7z\xbc\xaf\x27\x1c": ".7z", b"%PDF-": ".pdf",
    b"SQLite format 3\0": ".sqlite",
}  # fmt: skip
"""First bytes of a format, and a suffix of it."""
_JSON_START = re.compile(r"""\[?\s*\{\s*(["'])[^"'\n]{1,80}\1\s*:""")
"""An object, or a list of objects, whose first key is in quotes: no code and no prose."""
_JSON_KEY = re.compile(r"""["']([\w #-]{1,40})["']\s*:""")
_USUAL_COLUMNS = frozenset(
    {"text", "label", "sentence", "sentence1", "sentence2", "premise", "hypothesis", "quality",
     "index", "idx", "id", "input", "output", "instruction", "prompt", "completion", "response",
     "question", "answer", "query", "context", "title", "content", "review", "system", "user",
     "assistant", "messages", "conversations", "chosen", "rejected", "category", "class", "target",
     "source", "sentiment", "score", "summary", "article", "document",
     "#1 id", "#2 id", "#1 string", "#2 string"}
)  # fmt: skip
"""Names of columns by which a first line is known to be a header."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileKind:
    """Kind of a file that can't be read as text."""

    words: str
    """Name of the kind, such as JSON lines."""
    builder: str | None = None
    """Name by which ``datasets.load_dataset`` reads it; None where that reads no such file."""
    columns: tuple[str, ...] = ()
    """Names of its columns, as far as the first bytes tell."""
    is_packed: bool = False
    """Whether a program has to unpack it first."""


def not_text(path: Path, *, is_labelled: bool = False) -> FileKind | None:
    """Return the kind of a file that is no text: rows, an archive or a document; None for text.

    A TSV counts as text here, and so does any other file with tabs that is read as one
    (``is_labelled``). So does a file that can't be read: who reads it will say so.
    """
    head = b""
    with suppress(OSError):
        if path.is_file():  # a pipe would be waited for
            with path.open("rb") as file:
                head = file.read(_HEAD_BYTES)
    suffixes = [suffix.lower() for suffix in path.suffixes]
    last = suffixes[-1] if suffixes else ""
    by_bytes = next((own for start, own in _FIRST_BYTES.items() if head.startswith(start)), "")
    if last in _PACKED or by_bytes in _PACKED:
        if last in _DOCUMENTS:  # Word's and Excel's files are zip archives
            return FileKind(words=_DOCUMENTS[last])
        return _packed(last if last in _PACKED else by_bytes, suffixes)
    known = last if last in _ROWS or last in _DOCUMENTS else by_bytes
    if known in _DOCUMENTS:
        return FileKind(words=_DOCUMENTS[known])
    if known:
        return _rows(known, head)
    return _by_content(head, may_be_table=last != ".tsv" and not is_labelled)


def head_lines(path: Path) -> list[str]:
    """Return a file's first lines, as many as its first bytes hold whole."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    lines = _text(head).splitlines()
    return lines[:-1] if len(head) == _HEAD_BYTES else lines


def is_header(names: Sequence[str]) -> bool:
    """Return whether a line's fields are names of columns, as data sets usually call them."""
    return len(names) > 1 and all(name.strip().lower() in _USUAL_COLUMNS for name in names)


def _text(head: bytes) -> str:
    return head.decode("utf-8-sig", errors="replace")


def _packed(suffix: str, suffixes: Sequence[str]) -> FileKind:
    inner = next((part for part in suffixes if part in _ROWS), None)
    words = f"packed by {_PACKED[suffix]}"
    if inner is None:
        return FileKind(words=words, is_packed=True)
    name, builder = _ROWS[inner]
    return FileKind(words=f"{name} {words}", builder=builder, is_packed=True)


def _rows(suffix: str, head: bytes) -> FileKind:
    words, builder = _ROWS[suffix]
    columns: Sequence[str] = ()
    if suffix == ".csv":
        columns = _split_line(_text(head), ",;\t")
    elif builder == "json":
        columns = _keys(_text(head))
    return FileKind(words=words, builder=builder, columns=tuple(columns))


def _by_content(head: bytes, *, may_be_table: bool) -> FileKind | None:
    """Return the kind of a file whose name does not tell: JSON, or a table with a header."""
    text = _text(head).lstrip()
    if _JSON_START.match(text):
        first, _, rest = text.partition("\n")
        has_lines = first.rstrip().endswith("}") and rest.lstrip().startswith("{")
        return _rows(".jsonl" if has_lines else ".json", head)
    columns = _split_line(text, "\t,;") if may_be_table else []
    if not is_header(columns):
        return None
    return FileKind(words="a table", builder="csv", columns=tuple(map(str.strip, columns)))


def _split_line(text: str, separators: str) -> list[str]:
    """Return the fields of the first line, by the first separator that it has."""
    line = text.lstrip().partition("\n")[0].rstrip("\r")
    separator = next((one for one in separators if one in line), None)
    if separator is None:
        return [line] if line else []
    return next(iter(csv.reader([line], delimiter=separator)), [])


def _keys(text: str) -> list[str]:
    """Return the keys of the first object; those that can be seen where it is cut or no JSON."""
    start = text.find("{")
    if start < 0:
        return []
    try:
        found, _ = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return list(dict.fromkeys(_JSON_KEY.findall(text[start:])))
    return list(found)
