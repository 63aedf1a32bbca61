"""The records of a run: config.json, steps.jsonl, summary.json, and where they were made.

Every file is replaced by a rename, so a reader never sees half of one; steps.jsonl grows line by
line and a torn last line is dropped when it is read, any other damage refused. Importing this
does not load torch.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from experiments.commit import commit
from zenflow.config import PRESETS
from zenflow.errors import ConfigError
from zenflow.host.limits import usable_cores

RESULTS = Path(__file__).resolve().parent / "results"
"""Where records are committed."""

_PACKAGES = (
    "zenflow-offload", "torch", "numpy", "safetensors", "transformers", "datasets", "matplotlib",
)  # fmt: skip


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` by a file with this text, on the disk when the call returns."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_folder(path.parent)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace ``path`` by ``value`` as strict JSON (a number that is not finite becomes null)."""
    write_text(path, json.dumps(_strict(value), indent=2, allow_nan=False) + "\n")


def fsync_folder(folder: Path) -> None:
    """Flush a directory's entries, so that a rename in it survives a power cut."""
    if os.name == "nt":
        return  # Windows opens no directories; its rename is as durable as it gets
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._waiting = b""

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row, and what waits before it."""
        self._waiting += (json.dumps(_strict(row), allow_nan=False) + "\n").encode()
        with suppress(OSError):  # sync() tells
            self._write()

    def sync(self) -> None:
        """Have every row on the disk when the call returns.

        Raises:
            OSError: The disk does not take them.
        """
        self._write()
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _write(self) -> None:
        while self._waiting:  # a disk that is nearly full takes a part of a line
            self._waiting = self._waiting[os.write(self._descriptor, self._waiting) :]


RESULT_FILES = (
    "config.json", "steps.jsonl", "summary.json", "trace.json", "timeline.png", "compare.json",
    "compare.png", "decisions.jsonl", "tuning.png",
)  # fmt: skip
RESULT_FOLDERS = ("checkpoint", "model")
RUNS_OF_A_COMPARISON = ("start", *PRESETS, "auto", "zen-auto")


def remove_results(folder: Path) -> None:
    """Remove a run's or a comparison's results from a directory, and nothing else in it."""
    if not (folder / "config.json").is_file():
        return
    for name in RUNS_OF_A_COMPARISON:
        if (folder / name).is_dir():
            remove_results(folder / name)
            if not any((folder / name).iterdir()):
                (folder / name).rmdir()
    for name in RESULT_FOLDERS:
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in RESULT_FILES:
        (folder / name).unlink(missing_ok=True)


_NEEDED = ("step", "loss", "seconds", "stall_seconds", "tokens")


def read_steps(path: Path) -> list[dict[str, Any]]:
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


def _row(path: Path, number: int, line: bytes) -> dict[str, Any]:
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
    found: dict[str, Any] = row
    return found


def _problem(row: Any) -> str:
    """Return what keeps a value from being a step's row; nothing if it is one."""
    if not isinstance(row, dict):
        return "is no object"
    missing = [name for name in _NEEDED if name not in row]
    if missing:
        return f"lacks {', '.join(missing)}"
    for name in _NEEDED:
        if not isinstance(row[name], int | float) and not (name == "loss" and row[name] is None):
            return f"has a {name} of {row[name]!r}, which is no number"
    return ""


def provenance() -> dict[str, Any]:
    """Return hardware, versions and commit: where and with what a result was made."""
    return {"hardware": hardware(), "versions": versions(), "commit": commit()}


def results_folder(name: str) -> Path:
    """Return where a record of today, made on this CPU, is committed."""
    cpu = re.sub(r"[^a-z0-9]+", "-", _cpu_name().lower()).strip("-")
    return RESULTS / f"{time.strftime('%Y-%m-%d')}_{name}_{cpu}"


def newest(results: Path, name: str, file: str) -> Path | None:
    """Return the newest record of this name that holds a file; None if there is none."""
    return max((path.parent for path in results.glob(f"*_{name}_*/{file}")), default=None)


def newest_record(name: str, file: str) -> Path:
    """Return the folder of the newest committed record of this name that holds a file.

    Raises:
        ConfigError: This installation has none, since records come with a clone only.
    """
    found = newest(RESULTS, name, file)
    if found is None:
        raise ConfigError(
            f"{RESULTS} must have a record *_{name}_*/{file}, and has none: install from a clone "
            'of the repository, with pip install -e "."'
        )
    return found


def hardware() -> dict[str, Any]:
    """Return the CPU's name, cores and memory, and the GPU's name where torch sees one."""
    found: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()}",
        "gpu": None,
    }
    torch = sys.modules.get("torch")  # a summary of a run has it loaded; nothing else needs it
    if torch is not None and torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def machine_name() -> str:
    """Return the name of the GPU that trains here, or of the CPU."""
    found = hardware()
    return str(found["gpu"] or found["cpu"])


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that decide results."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that ``share`` of all values don't exceed; NaN of nothing."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return value
