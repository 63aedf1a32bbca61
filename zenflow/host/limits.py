"""Limits of this process: cores and memory that its machine and control groups allow."""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import psutil

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""A control group's file with its limit, that with its use, and the key of `memory.stat` for file
cache that can be dropped; of version 2 and of version 1."""


def usable_cores() -> int:
    """Return the cores that this process may use, by affinity and its control groups' quotas."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    quotas = (_quota(folder) for folder in control_groups("cpu"))
    return max(1, min([cores, *(int(quota) for quota in quotas if quota is not None)]))


def control_groups(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control group and of those above it, whose limits hold.

    Not every folder is there: a container may be told of groups that it does not see.

    Args:
        controller: Name in version 1, such as cpu or memory. Version 2 has one tree for all.
    """
    try:
        lines = _OWN_CGROUPS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = _CGROUPS / controller if controllers else _CGROUPS
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            yield folder
            if folder == base:
                break


def _quota(folder: Path) -> float | None:
    """Return a control group's quota of time, in cores; None without a limit."""
    for files in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            text = " ".join((folder / name).read_text(encoding="ascii") for name in files)
            quota, period = map(int, text.split())
        except (OSError, ValueError):  # no such file, or no quota ("max")
            continue
        if quota > 0:  # -1 is no quota
            return quota / period
    return None


def free_bytes() -> tuple[float, str]:
    """Return the bytes that this process may still take, and the name of the limit."""
    machine = psutil.virtual_memory().available + psutil.swap_memory().free
    groups = map(_group_bytes, control_groups("memory"))
    limits = [
        (float(machine), "the machine"),
        (min(groups, default=math.inf), "the container's limit"),
    ]
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        limits.append((float(soft - psutil.Process().memory_info().vms), "ulimit -v"))
    return min(limits)


def _group_bytes(folder: Path) -> float:
    """Return the bytes that a control group's limit leaves; infinite without a limit."""
    for limit, used, cache in _FILES:
        try:
            most = int((folder / limit).read_text(encoding="utf-8"))
            taken = int((folder / used).read_text(encoding="utf-8"))
            stat = (folder / "memory.stat").read_text(encoding="utf-8")
        except (OSError, ValueError):  # no such file, or no limit ("max")
            continue
        figures = dict(line.split(" ", 1) for line in stat.splitlines() if " " in line)
        return float(most - taken + int(figures.get(cache, 0)))
    return math.inf
