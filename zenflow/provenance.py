"""Provenance: the machine, the versions and the commit with which a result was made."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

import psutil

from zenflow.commit import commit
from zenflow.host.limits import usable_cores

_PACKAGES = (
    "zenflow-offload", "torch", "numpy", "safetensors", "transformers", "datasets", "matplotlib",
)  # fmt: skip


class Provenance(TypedDict):
    """Place, versions and commit of a result."""

    hardware: Mapping[str, Any]
    """Names and sizes, as `hardware` returns them."""
    versions: Mapping[str, str]
    """Versions by package, as `versions` returns them."""
    commit: str | None
    """Commit of the source; None where nobody knows it."""


def provenance() -> Provenance:
    """Return hardware, versions and commit: where and with what a result was made."""
    return {"hardware": hardware(), "versions": versions(), "commit": commit()}


def hardware() -> dict[str, Any]:
    """Return the CPU's name, cores and memory, and the GPU's name where torch sees one."""
    found: dict[str, Any] = {
        "cpu": cpu_name(),
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


def cpu_name() -> str:
    """Return the CPU's name as the system gives it, or its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())
