"""Journal: the finished points of a sweep in parts, so that it can go on where it ended.

A folder `points` holds them as Parquet files, which are only ever added, each whole or not at all.
`sweep.json` beside them says which sweep it is, and where and with what each session ran.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from experiments.output.files import fsync_folder, lock, replacing, write_json
from experiments.sweeps.columns import FAILED, RESULTS, TEXTS, Batch
from zenflow.errors import ConfigError

HEADER, PARTS = "sweep.json", "points"
_FORMAT = 2
_SECONDS, _SHARE = 1.0, 0.02
"""Time between two parts, at least, and as a share of the session so far: what a kill may cost.
The share keeps the parts of a long sweep few."""
_POINT = "point"


class Journal:
    """The journal of one sweep in its folder, for one process at a time.

    Attributes:
        done: Points that were finished before; those that failed were not.
        sessions: Provenance of every session so far.
    """

    def __init__(self, folder: Path, sweep: Mapping[str, Any]) -> None:
        """Read the points that the folder has.

        Raises:
            ConfigError: The folder holds another sweep, or something else.
        """
        self.folder, self.parts = folder, folder / PARTS
        self.sessions: list[Mapping[str, Any]] = []
        self.done = Batch.joined([])
        self._header = {"format": _FORMAT, "sweep": dict(sweep)}
        self._torn: list[Path] = []
        self._waiting: list[Batch] = []
        self._begun = self._written = 0.0
        if (folder / HEADER).exists():
            self._read()
        elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(
                f"--out must be new, empty or of this same sweep, but {folder} is not: choose "
                "another"
            )

    def _read(self) -> None:
        """Take every part.

        Raises:
            ConfigError: It is the journal of another sweep.
        """
        try:
            header = json.loads((self.folder / HEADER).read_text(encoding="utf-8"))
        except ValueError:
            header = {}
        self.sessions = header.pop("sessions", [])
        # The order of the axes is the order of the points, and dicts don't compare it.
        if header != self._header or _axes(header) != _axes(self._header):
            raise ConfigError(
                f"{self.folder} holds another sweep; it differs in "
                f"{_difference(header, self._header)}: give the same command to go on, or another "
                "--out"
            )
        batches = []
        for path in sorted(self.parts.glob("*.parquet")):
            try:
                batches.append(_batch(pq.read_table(path)))
            except (pa.ArrowException, OSError, KeyError):
                self._torn.append(path)  # by a failing disk: nothing here writes half of one
        found = Batch.joined(batches)
        self.done = found.where(found.columns["status"] != FAILED).sorted()

    @contextmanager
    def open(self, session: Mapping[str, Any]) -> Iterator[None]:
        """Begin a session: points can be added until its end, when all of them are on the disk.

        Raises:
            ConfigError: Another process is at work in the folder, or it can't be written.
        """
        try:
            self.parts.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{self.parts} can't be written ({error.strerror}): choose another --out"
            ) from error
        with _locked(self.parts):
            self.sessions.append(session)
            write_json(self.folder / HEADER, {**self._header, "sessions": self.sessions})
            for path in self._torn:
                path.unlink()
            self._begun = self._written = time.monotonic()
            try:
                yield
            finally:
                self._write()

    def add(self, batch: Batch) -> None:
        """Add points; from time to time what was added is written as a part."""
        self._waiting.append(batch)
        now = time.monotonic()
        if now - self._written >= max(_SECONDS, _SHARE * (now - self._begun)):
            self._write()

    def _write(self) -> None:
        if self._waiting:
            names = [int(path.stem) for path in self.parts.glob("*.parquet")]
            path = self.parts / f"{max(names, default=-1) + 1:06d}.parquet"
            with replacing(path) as draft:
                pq.write_table(_table(Batch.joined(self._waiting)), draft)
                with open(draft, "rb") as file:
                    os.fsync(file.fileno())
            fsync_folder(self.parts)
            self._waiting = []
        self._written = time.monotonic()


def _axes(header: Mapping[str, Any]) -> list[str]:
    return list(header["sweep"]["axes"])


def _table(batch: Batch) -> pa.Table:
    return pa.table({_POINT: batch.points, **batch.columns})


def _batch(table: pa.Table) -> Batch:
    """Return a part's points.

    Raises:
        KeyError: A column is missing.
    """
    columns = {
        name: np.asarray(table[name].to_pylist(), dtype=object)
        if name in TEXTS
        else table[name].to_numpy()
        for name in RESULTS
    }
    return Batch(points=table[_POINT].to_numpy(), columns=columns)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder for this process, where there are locks.

    Raises:
        ConfigError: Another process holds it.
    """
    if os.name == "nt":
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            lock(descriptor)
        except BlockingIOError:
            raise ConfigError(
                f"another sweep is at work in {folder.parent}: wait for it, or choose another "
                "--out"
            ) from None
        yield
    finally:
        os.close(descriptor)


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
