"""Whether the optimizer of a run fits the host's memory, asked before any of it is allocated."""

from __future__ import annotations

import math
import resource
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from sim.memory.engine import engine_memory
from zenflow.errors import ConfigError
from zenflow.host.limits import control_groups

if TYPE_CHECKING:
    from torch import nn

    from zenflow.config import ZenFlowConfig

_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""A control group's file with its limit, that with its use, and the key of `memory.stat` for file
cache that can be dropped; of version 2 and of version 1."""


def free_bytes() -> tuple[float, str]:
    """Return how many bytes this process may still take, and what sets the limit."""
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
    """Return what a control group's limit leaves; infinite without one."""
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
    trained = [p for p in model.parameters() if p.requires_grad]
    element_bytes = min((p.element_size() for p in trained), default=0)
    engine = engine_memory([tuple(p.shape) for p in trained], config, element_bytes)
    plan = engine.plan(has_ring=not on_cpu)
    needed = plan.host_bytes + (plan.device_extra_bytes if on_cpu else 0)
    free, limit = free_bytes()
    if needed > free:
        raise ConfigError(
            f"the optimizer needs {needed / 1e9:.1f} GB of host memory, and {limit} leaves "
            f"{max(0.0, free) / 1e9:.1f} GB: free some, raise the limit, or train a smaller model "
            "(zenflow plan says what a machine can do)"
        )
