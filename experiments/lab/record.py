"""Records of figures: one folder for each, ``<out>/<name>/``, with record.json and picture.png.

A folder appears whole, by a rename. ``<out>/.partial`` has what interrupted figures keep.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.lab.figure import Data, Job, PaperFigure
from experiments.lab.finding import Finding
from experiments.output.files import write_json
from experiments.output.provenance import RESULTS, provenance
from zenflow.errors import ConfigError

RECORD = "record.json"
PICTURE = "picture.png"
FORMAT = 1
_PARTIAL = ".partial"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A figure's numbers with where they come from."""

    folder: Path
    name: str
    config: Mapping[str, Any]
    data: Data
    findings: tuple[Finding, ...]
    commit: str | None
    hardware: Mapping[str, Any]
    seconds: float
    """That making the numbers took; interrupted attempts not counted."""


def read(folder: Path) -> Record:
    """Return the record in a folder.

    Raises:
        ConfigError: There is none, or it can't be read.
    """
    path = folder / RECORD
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] != FORMAT:
            raise ConfigError(
                f"{path} has format {found['format']}, this version reads {FORMAT}: make the "
                f"figure again with `zenflow figures {folder.name} --force`"
            )
        return Record(
            folder=folder,
            name=found["name"],
            config=found["config"],
            data=found["data"],
            findings=tuple(Finding.from_dict(finding) for finding in found["findings"]),
            commit=found["commit"],
            hardware=found["hardware"],
            seconds=found["seconds"],
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{path} is no record of a figure ({type(error).__name__}: {error}): make it again "
            f"with `zenflow figures {folder.name} --force`"
        ) from error


def done(out: Path, figure: PaperFigure, job: Job) -> Record | None:
    """Return the record of the same figure with the same settings; None if there is none."""
    try:
        found = read(out / figure.name)
    except ConfigError:
        return None
    return found if found.config == figure.config(job) else None


def committed(name: str, results: Path = RESULTS) -> Record | None:
    """Return the newest committed record of a figure; None if there is none."""
    found = max(results.glob(f"*_figures_*/{name}/{RECORD}"), default=None)
    return None if found is None else read(found.parent)


def partial_folder(out: Path, figure: PaperFigure, job: Job) -> Path:
    """Return where a figure with these settings keeps partial results, made if need be."""
    config = figure.config(job)
    parts = [
        figure.name,
        *(f"{key}-{value}" for key, value in config.items() if value is not None),
    ]
    folder = out / _PARTIAL / "_".join(parts).replace(os.sep, "-")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def drop_partial(out: Path, figure: PaperFigure, job: Job) -> None:
    """Remove what a figure has kept; it is done, or to be made from its beginning."""
    shutil.rmtree(partial_folder(out, figure, job), ignore_errors=True)
    if not any((out / _PARTIAL).iterdir()):
        (out / _PARTIAL).rmdir()


def write(out: Path, figure: PaperFigure, job: Job, data: Data, seconds: float) -> Record:
    """Write numbers, findings and picture, whole or not at all, in place of an earlier record."""
    record = {
        "format": FORMAT,
        "name": figure.name,
        "number": figure.number,
        "title": figure.title,
        "config": figure.config(job),
        "findings": [finding.to_dict() for finding in figure.findings(data)],
        "data": data,
        "seconds": seconds,
        **provenance(),
    }
    return _replace(out, figure, record)


def adopt(out: Path, figure: PaperFigure, record: Record) -> Record:
    """Put a committed record where a fresh one would lie: its numbers and origin, drawn anew."""
    kept = json.loads((record.folder / RECORD).read_text(encoding="utf-8"))
    return _replace(out, figure, kept)


def draw(folder: Path, figure: PaperFigure, data: Data) -> None:
    """Write a record's picture."""
    from experiments.output.plots import save_figure  # slow to load

    save_figure(figure.draw(data), folder / PICTURE)


def _replace(out: Path, figure: PaperFigure, record: Mapping[str, Any]) -> Record:
    out.mkdir(parents=True, exist_ok=True)
    final = out / figure.name
    draft = out / f".{figure.name}.{os.getpid()}"
    former = out / f".{figure.name}.{os.getpid()}.former"
    try:
        draft.mkdir()
        write_json(draft / RECORD, record)
        # What is drawn is what was written: numbers that are not finite have become null.
        draw(draft, figure, read(draft).data)
        if final.exists():
            final.rename(former)
        draft.rename(final)
    finally:
        if former.exists() and not final.exists():
            former.rename(final)
        shutil.rmtree(draft, ignore_errors=True)
        shutil.rmtree(former, ignore_errors=True)
    return read(final)
