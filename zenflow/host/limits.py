"""What this process may use of its machine: cores, and the control groups that set limits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


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
    """Return the cores' worth of time that a group has; None without a limit."""
    for files in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            text = " ".join((folder / name).read_text(encoding="ascii") for name in files)
            quota, period = map(int, text.split())
        except (OSError, ValueError):  # no such file, or no quota ("max")
            continue
        if quota > 0:  # -1 is no quota
            return quota / period
    return None
