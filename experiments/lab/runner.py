"""The one runner: makes the cells that no folder and no record has, and keeps each as it comes."""

from __future__ import annotations

import json
import math
import multiprocessing
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from experiments.lab import catalogue
from experiments.lab import record as records
from experiments.lab.interrupts import ended_like_ctrl_c, ignore_while_idle
from experiments.lab.record import Record, refuse_others
from experiments.lab.study import (
    OWN,
    Cell,
    Data,
    Job,
    Progress,
    Row,
    Scope,
    Study,
    as_json,
    identity,
)
from experiments.output.files import write_json
from zenflow.errors import ConfigError
from zenflow.provenance import provenance

_MARK, _SAME = "study.json", "same.json"
_SOURCE = "source"
"""Key under which rows name the record they are from, in studies that reuse others'."""


@dataclass(slots=True, kw_only=True)
class Runner:
    """One study on its way to a record."""

    study: Study
    """Study that is made."""
    scope: Scope
    """Extent to which the study is made, by `Study.scope`."""
    folder: Path
    """Folder of the record."""
    kept: Path
    """Folder of what an interrupted study keeps; removed once the record is there."""
    force: bool = False
    """Whether everything is made anew; the record that is there stays until then."""
    workers: int = 1
    """Number of cells at a time, where the study allows more than one."""
    seconds: float | None = None
    """Time after which no other cell is begun; the record then has those that are there."""
    extend: bool = False
    """Whether this commit may add rows, which name it, to a record of another commit, once it has
    made that record's first and last row again."""
    progress: Progress = lambda share, text: None
    """Called as cells advance."""
    made: int = field(default=0, init=False)
    """Number of cells made by this runner."""
    left: int = field(default=0, init=False)
    """Number of cells that the same call would still make."""
    _end: float = field(init=False, default=math.inf)
    _config: Data = field(init=False)
    _rows: dict[str, Row] = field(init=False, default_factory=dict)
    """Rows that are there, by the cell's slug."""
    _reused: dict[str, Row] = field(init=False, default_factory=dict)
    """Rows of other studies' records, by the cell's slug."""
    _seconds: float = field(init=False, default=0.0)
    _added_by: str | None = field(init=False, default=None)
    """This program's commit, where it adds to a record of another."""

    def run(self) -> Record:
        """Return the record, made now but for what is there.

        Raises:
            ConfigError: A folder holds another study, or was made by another commit or machine.
            KeyboardInterrupt: The study was stopped; what is done is kept.
        """
        self._config = self.study.config(self.scope)
        cells = self.study.cells(self.scope)
        if self.force and (self.kept / _MARK).is_file():
            shutil.rmtree(self.kept)
        before = None if self.force else records.there(self.folder, self.study, self._config)
        self._take(before, cells)
        missing = self._missing(cells)
        if before is not None and not missing:
            return before
        if missing:
            self._open(before)
            if before is not None and self._added_by is not None:
                self._prove(before, cells)
            missing = self._missing(cells)
            self._make(missing)
        rows = [self._rows[cell.slug] for cell in cells if cell.slug in self._rows]
        rows += [self._reused[cell.slug] for cell in cells if cell.slug in self._reused]
        if before is not None and self._added_by is not None:
            header = {**before.header, "seconds": self._seconds}
            record = records.put(self.folder, self.study, header, rows)
        else:
            record = records.write(self.folder, self.study, self._config, rows, self._seconds)
        self.left = len(self._missing(cells))
        if not self.left:
            shutil.rmtree(self.kept, ignore_errors=True)
        return record

    def _take(self, before: Record | None, cells: Sequence[Cell]) -> None:
        """Find cells' rows in the record that is there and in those of other studies."""
        own = _by_identity([] if before is None else before.rows, cells)
        self._rows |= {slug: row for slug, row in own.items() if _is_own(row)}
        self._reused |= {slug: row for slug, row in own.items() if not _is_own(row)}
        for key in self.study.reuses:
            found = records.committed(key)
            if found is None or self.scope.smoke or not found.is_of(catalogue.load(key)):
                continue
            names = {cell.slug: cell for cell in cells}
            for slug, row in _by_identity(found.rows, cells).items():
                labels = {**names[slug].labels, _SOURCE: found.folder.name}
                self._reused.setdefault(slug, {**row, **labels})

    def _missing(self, cells: Sequence[Cell]) -> list[Cell]:
        """Return the cells to be made, each behind those that it needs."""
        found: dict[str, Cell] = {}

        def add(cell: Cell) -> None:
            if cell.slug not in self._rows:
                for need in cell.needs:
                    add(need)
                found.setdefault(cell.slug, cell)

        for cell in cells:
            if cell.slug not in self._reused:
                add(cell)
        return list(found.values())

    def _open(self, before: Record | None) -> None:
        """Open the folder of kept cells, and read those that are there."""
        here = provenance()
        own = {"study": self.study.key, **self._config, **_origin(here)}
        counted: set[str] = set()
        if before is not None and self._rows:
            theirs = {"study": before.name, **before.config, **_origin(before.header)}
            if self.extend and own["commit"] not in (None, theirs["commit"]):
                self._added_by, theirs["commit"] = here["commit"], own["commit"]
            refuse_others(self.folder, theirs, own)
            self._seconds, counted = float(before.header["seconds"] or 0.0), set(self._rows)
        mark = self.kept / _MARK
        if not mark.is_file():
            if self.kept.exists() and any(self.kept.iterdir()):
                raise ConfigError(
                    f"{self.kept} holds something else than a study's cells: name an empty folder "
                    "with --keep"
                )
            self.kept.mkdir(parents=True, exist_ok=True)
            write_json(mark, own)
        refuse_others(self.kept, json.loads(mark.read_text(encoding="utf-8")), own)
        for path in sorted(self.kept.glob("*/row.json")):
            if path.parent.name not in counted:
                found = json.loads(path.read_text(encoding="utf-8"))
                self._rows[path.parent.name] = self._named(found["row"])
                self._seconds += found["seconds"]

    def _prove(self, before: Record, cells: Sequence[Cell]) -> None:
        """Make the first and the last cell of another commit's record again, and compare.

        Raises:
            ConfigError: A row differs: the two programs' rows can't stand in one record.
        """
        same, facts = self.kept / _SAME, {"commit": before.commit}
        if same.is_file() and json.loads(same.read_text(encoding="utf-8")) == facts:
            return
        recorded = _by_identity(before.rows, cells)
        own = [cell for cell in cells if _is_own(recorded.get(cell.slug, {_SOURCE: None}))]
        for cell, row, _ in self._one_by_one(own[:1] + own[1:][-1:]):
            was = recorded[cell.slug]
            changed = [
                f"{name} was {was.get(name)!r}, now {value!r}"
                for name, value in as_json(row).items()
                if value != was.get(name)
            ]
            if changed:
                raise ConfigError(
                    f"{self.folder} can't be added to by commit {self._added_by}: its cell "
                    f"{cell.name}, made again, differs ({'; '.join(changed)[:300]}): go on with "
                    f"commit {before.commit}, or make all anew with --force"
                )
        write_json(same, facts)

    def _named(self, row: Row) -> Row:
        """Return a row made by this commit as the record has it."""
        return row if self._added_by is None else {**row, records.COMMIT: self._added_by}

    def _make(self, missing: Sequence[Cell]) -> None:
        """Make cells and keep each as it comes."""
        if self.seconds is not None:
            self._end = time.monotonic() + self.seconds
        workers = 1 if self.study.one_at_a_time else min(self.workers, len(missing))
        makers = self._one_by_one(missing) if workers <= 1 else self._together(missing, workers)
        for cell, row, seconds in makers:
            origin = {_SOURCE: OWN} if self.study.reuses else {}
            whole = {**cell.labels, **cell.settings, **origin, **row}
            path = self.kept / cell.slug / "row.json"
            write_json(path, {"row": whole, "seconds": seconds})
            # A row is what was written, whether it was made now or before.
            kept = json.loads(path.read_text(encoding="utf-8"))["row"]
            self._rows[cell.slug] = self._named(kept)
            self._seconds += seconds
            self.made += 1
            self.progress(self.made / len(missing), cell.name)

    def _one_by_one(self, cells: Sequence[Cell]) -> Iterator[tuple[Cell, Row, float]]:
        for number, cell in enumerate(cells):

            def show(share: float, text: str, number: int = number) -> None:
                self.progress((number + share) / len(cells), text)

            begun = time.monotonic()
            if begun >= self._end:
                return
            row = self.study.run(cell, replace(self._job(cell), progress=show))
            yield cell, row, time.monotonic() - begun

    def _together(self, cells: Sequence[Cell], workers: int) -> Iterator[tuple[Cell, Row, float]]:
        """Yield rows of cells made by several processes, none before those that it needs."""
        waiting = {cell.slug: cell for cell in cells}
        running: dict[Future[tuple[Row, float]], Cell] = {}
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, context, initializer=ignore_while_idle) as pool:
            try:
                while waiting or running:
                    if time.monotonic() >= self._end:
                        waiting.clear()
                        if not running:
                            return
                    ready = [
                        cell
                        for cell in waiting.values()
                        if all(need.slug in self._rows for need in cell.needs)
                    ]
                    for cell in ready[: workers - len(running)]:  # the rest may find no time
                        del waiting[cell.slug]
                        job = self._job(cell)
                        running[pool.submit(_carried_out, self.study.key, cell, job)] = cell
                    done, _ = wait(running, return_when=FIRST_COMPLETED)
                    for future in done:
                        yield running.pop(future), *future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for process in multiprocessing.active_children():
                    process.terminate()  # a run notes it and ends its step; the idle are told
                raise

    def _job(self, cell: Cell) -> Job:
        folder = self.kept / cell.slug
        folder.mkdir(parents=True, exist_ok=True)
        needs = {need.slug: self._rows[need.slug] for need in cell.needs}
        return Job(**asdict(self.scope), folder=folder, needs=needs)


def _carried_out(key: str, cell: Cell, job: Job) -> tuple[Row, float]:
    """Make a cell in another process."""
    begun = time.monotonic()
    with ended_like_ctrl_c():
        return catalogue.load(key).run(cell, job), time.monotonic() - begun


def _by_identity(rows: Sequence[Row], cells: Sequence[Cell]) -> dict[str, Row]:
    """Return the rows of cells by their slug; a row is the cell's whose settings it repeats."""
    found: dict[str, Row] = {}
    names = list(dict.fromkeys(name for cell in cells for name in cell.settings))
    by_key = {identity({name: row.get(name) for name in names}): row for row in reversed(rows)}
    for cell in cells:
        if cell.key in by_key:
            found[cell.slug] = by_key[cell.key]
    return found


def _is_own(row: Row) -> bool:
    return bool(row.get(_SOURCE, OWN) == OWN)


def _origin(found: Mapping[str, Any]) -> Data:
    """Return the facts in which the rows of one record must agree: the commit and the machine."""
    hardware, commit = found["hardware"], found["commit"]
    # "-dirty" says that something was changed and not what, so it tells no two programs apart.
    commit = None if commit is None else commit.removesuffix("-dirty")
    return {"commit": commit, "machine": f"{hardware['cpu']}, {hardware['cores']} cores"}
