"""Host memory: what a process may still take, and what a run's optimizer will take at least."""

from __future__ import annotations

import math
import resource
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from zenflow.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from zenflow.config import ZenFlowConfig

_HOST_BYTES = 12
"""Of each deferred parameter: master weight and two moments, float32."""
_DEVICE_BYTES = 8
"""Of each other parameter: two moments; a float32 weight is its own master."""
_SUM_BYTES = 4
"""Of each deferred parameter with window moments: a sum of gradients."""
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def free_bytes() -> tuple[float, str]:
    """Return how many bytes this process may still take, and what sets the limit."""
    machine = psutil.virtual_memory().available + psutil.swap_memory().free
    limits = [
        (float(machine), "the machine"),
        (_cgroup_bytes(_OWN_CGROUPS, _CGROUPS), "the container's limit"),
    ]
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        limits.append((float(soft - psutil.Process().memory_info().vms), "ulimit -v"))
    return min(limits)


def _cgroup_bytes(own: Path, root: Path) -> float:
    """Return what the limits of this process's control groups leave; infinite without any.

    A limit holds for a group and all above it. File cache that can be dropped counts as free.
    """
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return math.inf
    least = math.inf
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            least = min(least, _group_bytes(folder, *names))
            if folder == base:
                break
    return least


def _group_bytes(folder: Path, limit: str, used: str, cache: str) -> float:
    try:
        most = (folder / limit).read_text(encoding="utf-8").strip()
        taken = int((folder / used).read_text(encoding="utf-8"))
        stat = (folder / "memory.stat").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return math.inf
    if most == "max":
        return math.inf
    figures = dict(line.split(" ", 1) for line in stat.splitlines() if " " in line)
    return float(int(most) - taken + int(figures.get(cache, 0)))


def check_host_memory(model: nn.Module, config: ZenFlowConfig, *, on_cpu: bool) -> None:
    """Refuse a run whose optimizer can't have the memory that it allocates at once.

    Only what is sure is counted, states and staging: activations and gradients may still be too
    much.

    Args:
        model: With its parameters where they will be trained.
        config: The update rule.
        on_cpu: Whether the device's share is in the host's memory too.

    Raises:
        ConfigError: There is not as much; the message says how much and what limits it.
    """
    num_sums = 0
    if config.deferred_moments == "window" and config.update_interval > 1:
        num_sums = 2 if config.effective_lag() > 1 else 1
    needed = 0.0
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        is_split = parameter.ndim >= 2 and parameter.numel() >= config.min_split_elements
        deferred = parameter.numel() * (1 - config.topk_ratio if is_split else 0.0)
        needed += deferred * (_HOST_BYTES + num_sums * _SUM_BYTES + parameter.element_size())
        needed += (parameter.numel() - deferred) * _DEVICE_BYTES * on_cpu
    free, limit = free_bytes()
    if needed > free:
        raise ConfigError(
            f"the optimizer needs {needed / 1e9:.1f} GB of host memory, and {limit} leaves "
            f"{max(0.0, free) / 1e9:.1f} GB: free some, raise the limit, or train a smaller model "
            "(zenflow plan says what a machine can do)"
        )
