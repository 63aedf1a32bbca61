"""Loading: paths on a command line to the runs, traces and tables that they hold."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.report.runs import Run, json_if_there, read_json, read_run, run_of_summary
from experiments.report.tables import SweepTable, find_table, read_table, record_beside
from experiments.report.trace_view import TraceView, read_view
from experiments.traces.compare import TRACE_FILES
from zenflow.errors import ConfigError

ACCEPTED = (
    "accepted are directories of `zenflow train` (a run, or a comparison), of `zenflow sweep` and "
    "`zenflow tune`, traces (.json, .json.gz) and tables (.csv, .parquet)"
)
_RUN_FILES = ("summary.json", "steps.jsonl", "config.json")
_TRACE_ENDS = (".json", ".json.gz")


@dataclass(slots=True)
class Contents:
    """Everything that a page shows."""

    runs: list[Run] = field(default_factory=list)
    traces: list[TraceView] = field(default_factory=list)
    """Trace files given alone; a run has its own."""
    tables: list[SweepTable] = field(default_factory=list)
    records: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)
    """Paths and the JSON that says where and with what each was made."""
    notes: list[str] = field(default_factory=list)


def load(paths: Sequence[Path]) -> Contents:
    """Return the content of the paths; one that is given twice counts once.

    Raises:
        ConfigError: A path holds nothing that a page can show. The message says which, what it
            lacks and what would be accepted.
    """
    contents = Contents()
    for path in {os.path.realpath(path): path for path in paths}.values():
        if path.is_dir():
            _load_folder(path, contents)
        elif path.is_file():
            _load_file(path, contents)
        else:
            raise ConfigError(f"{path} does not exist: check the path; {ACCEPTED}")
    return contents


def _load_folder(folder: Path, contents: Contents) -> None:
    config = json_if_there(folder / "config.json")
    if "compare" in config:
        _load_comparison(folder, config, contents)
    elif (table := find_table(folder)) is not None:
        _load_table(table, contents)
    elif (folder / "steps.jsonl").is_file() or _is_summary_of_run(folder):
        _add_run(read_run(folder), contents)
    elif traces := [folder / name for name in TRACE_FILES if (folder / name).is_file()]:
        contents.traces.append(read_view(traces[0]))
    else:
        raise ConfigError(_nothing_in(folder))


def _load_file(path: Path, contents: Contents) -> None:
    if path.suffix in (".csv", ".parquet"):
        _load_table(path, contents)
    elif path.name in _RUN_FILES or path.suffix == ".jsonl":
        raise ConfigError(
            f"{path} is one file of a run, and a page needs the others too: name its directory, "
            f"{path.parent}"
        )
    elif path.name.endswith(_TRACE_ENDS):
        contents.traces.append(read_view(path))
    else:
        raise ConfigError(f"{path} is of a kind that a page can't show: {ACCEPTED}")


def _load_comparison(folder: Path, config: Mapping[str, Any], contents: Contents) -> None:
    """Add a comparison's runs; of a record that kept no folders, those of compare.json."""
    names = [str(name) for name in config["compare"]]
    here = [name for name in names if _is_run(folder / name)]
    summaries = json_if_there(folder / "compare.json").get("runs") or {}
    for name in names:
        if name in here:
            _add_run(read_run(folder / name), contents)
        elif isinstance(summaries.get(name), Mapping):
            _add_run(run_of_summary(summaries[name], str(folder / name)), contents)
        else:
            contents.notes.append(f"{folder / name} has no run yet: the comparison goes on")
    if not here and not summaries:
        raise ConfigError(
            f"{folder} is a comparison of {', '.join(names)}, but no run of it has taken a step: "
            f"go on with it by zenflow train --resume {folder}"
        )
    if not here:
        contents.notes.append(
            f"{folder} keeps the summaries of its runs, but neither steps nor traces: no curves "
            "or lanes of them are drawn"
        )


def _add_run(run: Run, contents: Contents) -> None:
    contents.runs.append(run)
    contents.notes += run.notes
    contents.records.append((run.path, run.summary))


def _load_table(path: Path, contents: Contents) -> None:
    beside = record_beside(path)
    record = {} if beside is None else read_json(beside)
    if beside is None:
        contents.notes.append(
            f"{path} has no provenance.json beside it: which columns are axes is guessed from "
            "their values, and where it was made is unknown"
        )
    table = read_table(path, record)
    contents.tables.append(table)
    if len(table.rows) < table.num_rows:
        contents.notes.append(
            f"{path}: {len(table.rows):,} of {table.num_rows:,} rows are on this page, taken at "
            "equal distances (of a sweep along its longest axes); the file has all"
        )
    contents.records += [(str(path), session) for session in table.sessions]


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("summary.json", "steps.jsonl"))


def _is_summary_of_run(folder: Path) -> bool:
    return "mean_step_seconds" in json_if_there(folder / "summary.json")


def _nothing_in(folder: Path) -> str:
    inner = [path.name for path in sorted(folder.iterdir()) if path.is_dir() and _shows(path)]
    if inner:
        some = ", ".join(inner[:6]) + (" and others" if len(inner) > 6 else "")
        return f"{folder} holds no results itself, but its directories do: name some of {some}"
    return (
        f"{folder} lacks what a page is made of: it has neither a run (config.json, steps.jsonl, "
        f"summary.json), nor a trace.json, nor a table; {ACCEPTED}"
    )


def _shows(folder: Path) -> bool:
    has_trace = any((folder / name).is_file() for name in TRACE_FILES)
    is_run = _is_run(folder) or (folder / "config.json").is_file()
    return is_run or has_trace or find_table(folder) is not None
