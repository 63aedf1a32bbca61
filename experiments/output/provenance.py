"""Provenance: place, versions and commit of a result, and the folder of committed records."""

from __future__ import annotations

import importlib.metadata
import math
import platform
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from experiments.output.commit import commit
from experiments.output.run_types import Provenance
from zenflow.errors import ConfigError
from zenflow.host.limits import usable_cores

RESULTS = Path(__file__).resolve().parents[2] / "evidence" / "results"
"""Folder of committed records."""

_PACKAGES = (
    "zenflow-offload", "torch", "numpy", "safetensors", "transformers", "datasets", "matplotlib",
)  # fmt: skip


def provenance() -> Provenance:
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
