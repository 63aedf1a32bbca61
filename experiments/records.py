"""The records of a run: config.json, steps.jsonl, summary.json, and where they were made.

Every file is replaced by a rename, so a reader never sees half of one; steps.jsonl grows line by
line and a torn last line is dropped when it is read. Importing this does not load torch.
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
from pathlib import Path
from typing import Any, TextIO

import psutil

from experiments.commit import commit
from zenflow.config import PRESETS
from zenflow.errors import ConfigError

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
    """steps.jsonl: one line per optimizer step, flushed as it is written."""

    def __init__(self, path: Path, *, keep_steps: int = 0) -> None:
        """Open the file with its rows up to ``keep_steps``: later ones will be run again."""
        self._path = path
        kept = [row for row in read_steps(path) if row["step"] <= keep_steps]
        write_text(path, "".join(json.dumps(row) + "\n" for row in kept))
        self._file: TextIO = open(path, "a", encoding="utf-8")  # noqa: SIM115  (closed below)

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row."""
        self._file.write(json.dumps(_strict(row), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


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


def read_steps(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a steps.jsonl; empty if there is none, without a torn last line."""
    if not path.is_file():
        return []
    rows: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


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
        "cores": available_cores(),
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


def available_cores() -> int:
    """Return the cores this process may use, which a container may have made fewer."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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
