"""steps.jsonl: a row for each step of a run, written as steps are taken, and read again.

The file grows line by line. A torn last line is dropped when it is read, any other damage is
refused.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from experiments.output.files import strict, write_text
from experiments.output.run_types import StepRow
from zenflow.errors import ConfigError, naming_file


class StepLog:
    """steps.jsonl: one line per optimizer step, with the operating system as it is appended.

    A line that the disk does not take waits for the next one: its steps are taken all the same.
    """

    def __init__(self, path: Path, *, keep_steps: int = 0) -> None:
        """Open the file with its rows up to ``keep_steps``: later ones will be run again.

        Raises:
            ConfigError: A row of the file is not what was written.
        """
        kept = [row for row in read_steps(path) if row["step"] <= keep_steps]
        self.num_missing = keep_steps - len(kept)
        """Steps before ``keep_steps`` that have no row."""
        write_text(path, "".join(json.dumps(row) + "\n" for row in kept))
        self._path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._waiting = b""

    def append(self, row: StepRow) -> None:
        """Write one row, and what waits before it."""
        self._waiting += (json.dumps(strict(row), allow_nan=False) + "\n").encode()
        with suppress(OSError):  # sync() tells
            self._write()

    def sync(self) -> None:
        """Have every row on the disk when the call returns.

        Raises:
            OSError: The disk does not take them.
        """
        with naming_file(self._path):
            self._write()
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _write(self) -> None:
        while self._waiting:  # a disk that is nearly full takes a part of a line
            self._waiting = self._waiting[os.write(self._descriptor, self._waiting) :]


_NEEDED = ("step", "loss", "seconds", "stall_seconds", "tokens")


def read_steps(path: Path) -> list[StepRow]:
    """Return the rows of a steps.jsonl; empty if there is none, without a torn last line.

    A loss that was not finite is None.

    Raises:
        ConfigError: A line is not a step's row; the message says which.
    """
    try:
        *lines, rest = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"{path} can't be read ({error.strerror}): check the file") from error
    rows = [_row(path, number, line) for number, line in enumerate(lines, start=1)]
    try:
        json.loads(rest)
    except ValueError:
        return rows  # nothing, or half a line of a process that was killed
    return [*rows, _row(path, len(lines) + 1, rest)]


def _row(path: Path, number: int, line: bytes) -> StepRow:
    """Return a line's row, or raise a ``ConfigError`` that says what is wrong with it."""
    try:
        row = json.loads(line)
        problem = _problem(row)
    except (ValueError, RecursionError) as error:
        problem = f"can't be read ({error})"
    if problem:
        raise ConfigError(
            f"{path}, line {number}: each line must be a step's JSON, but this one {problem}: "
            "restore the file from a copy, or remove that line to do without its step"
        )
    found: StepRow = row
    return found


def _problem(row: Any) -> str:
    """Return the reason why a value is no step's row; an empty text for a row."""
    if not isinstance(row, dict):
        return "is no object"
    missing = [name for name in _NEEDED if name not in row]
    if missing:
        return f"lacks {', '.join(missing)}"
    for name in _NEEDED:
        if not isinstance(row[name], int | float) and not (name == "loss" and row[name] is None):
            return f"has a {name} of {row[name]!r}, which is no number"
    return ""
