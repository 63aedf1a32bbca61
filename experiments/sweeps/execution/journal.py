"""Journal: the finished points of a sweep, one line each, so that it can go on where it ended.

Lines are only ever appended. The first says which sweep it is, each session adds where and with
what it ran, and the rest are points. A line that a crash tore is dropped when the file is read,
and cut off before the next one is written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from experiments.output.files import fsync_folder
from experiments.sweeps.points import FAILED, Row
from zenflow.errors import ConfigError

NAME = "points.jsonl"
_FORMAT = 1


class Journal:
    """The journal of one sweep in its folder, for one process at a time.

    Attributes:
        rows: Of points that were finished before, by index; those that failed were not.
        sessions: Provenance of every session so far.
    """

    def __init__(self, folder: Path, sweep: Mapping[str, Any]) -> None:
        """Read what is there.

        Raises:
            ConfigError: The folder holds another sweep, or something else; or it can't be written.
        """
        self.path = folder / NAME
        self.rows: dict[int, Row] = {}
        self.sessions: list[Mapping[str, Any]] = []
        self._header = {"format": _FORMAT, "sweep": dict(sweep)}
        self._file: BinaryIO | None = None
        self._whole = 0
        if self.path.exists():
            self._read()
        elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(
                f"--out must be new, empty or of this same sweep, but {folder} is not: choose "
                "another"
            )

    def _read(self) -> None:
        """Take every whole line.

        Raises:
            ConfigError: It is the journal of another sweep.
        """
        header: Any = None
        for line in self.path.read_bytes().splitlines(keepends=True):
            try:
                item = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                item = None
            if not isinstance(item, dict):
                break  # torn: nothing behind it was meant to be read
            if header is None:
                header = item
            elif "session" in item:
                self.sessions.append(item["session"])
            elif item["row"]["status"] != FAILED:
                self.rows[item["point"]] = item["row"]
            self._whole += len(line)
        # As text: the order of the axes is the order of the points, and dicts don't compare it.
        if header is not None and json.dumps(header) != json.dumps(self._header):
            raise ConfigError(
                f"{self.path.parent} holds another sweep; it differs in "
                f"{_difference(header, self._header)}: give the same command to go on, or another "
                "--out"
            )

    @contextmanager
    def open(self, session: Mapping[str, Any]) -> Iterator[None]:
        """Begin a session: what was torn is cut off, and points can be added until its end.

        When it ends the file is on the disk.

        Raises:
            ConfigError: Another process is at work in the folder, or it can't be written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = open(self.path, "ab")  # noqa: SIM115  (closed by close)
        except OSError as error:
            raise ConfigError(
                f"{self.path} can't be written ({error.strerror}): choose another --out"
            ) from error
        with file:
            if not _locked(file):
                raise ConfigError(
                    f"another sweep is at work in {self.path.parent}: wait for it, or choose "
                    "another --out"
                )
            self._file = file
            if file.tell() > self._whole:
                file.truncate(self._whole)
            if not self._whole:
                self._append(self._header)
                fsync_folder(self.path.parent)
            self.sessions.append(session)
            self._append({"session": session})
            try:
                yield
            finally:
                os.fsync(file.fileno())

    def add(self, index: int, row: Row) -> None:
        """Append a point."""
        self._append({"point": index, "row": row})

    def _append(self, item: Mapping[str, Any]) -> None:
        assert self._file is not None
        self._file.write(json.dumps(item, separators=(",", ":")).encode() + b"\n")
        self._file.flush()


def _locked(file: BinaryIO) -> bool:
    """Lock a file for this process, as long as it is open; True where there are no locks."""
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Return in what two headers differ, in words."""
    if old.get("format") != new["format"] or not isinstance(old.get("sweep"), dict):
        return "the format of its journal"
    mine, other = new["sweep"], old["sweep"]
    names = [name for name in {**mine, **other} if mine.get(name) != other.get(name)]
    parts = []
    for name in names:
        a, b = other.get(name), mine.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            for key in {**a, **b}:
                if a.get(key) != b.get(key):
                    parts.append(f"{key} ({_shown(a.get(key))}, now {_shown(b.get(key))})")
        else:
            parts.append(f"{name} ({_shown(a)}, now {_shown(b)})")
    return ", ".join(parts) or "the order of its axes"


def _shown(value: Any) -> str:
    if isinstance(value, list):
        listed = ", ".join(map(str, value[:6]))
        return f"{listed}, ..." if len(value) > 6 else listed
    return "none" if value is None else str(value)
