"""What to change where no setting of a model fits a machine. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from autotune.constraints import Constraints, Feasibility
from autotune.offline.backends import AbstractBackend
from autotune.space import SearchSpace

Simulation = Callable[[Mapping[str, Any]], tuple[AbstractBackend, Constraints]]
"""From flags of `zenflow tune` to the backend and the limits that the machine sets."""

_GIB = 1 << 30
_LEAST_RAM = 64


def remedy(flags: Mapping[str, Any], simulation: Simulation, space: SearchSpace) -> str:
    """Return a sentence with the flags that make some setting fit, or nothing if none do.

    Checkpointing, more host memory and a smaller batch are tried, in this order.

    Args:
        flags: Of the command that found nothing.
        simulation: Makes backend and limits of other flags.
        space: Where a setting is looked for.
    """
    for changes in _changes(flags):
        backend, limits = simulation({**flags, **changes})
        others = limits if flags["host_memory"] else replace(limits, host_bytes=None)
        feasible = Feasibility(others, backend.need, space)
        allowed = [knobs for knobs in space.grid() if feasible.allows(knobs)]
        if not allowed:
            continue
        host_bytes = min(feasible.need(knobs).host_bytes for knobs in allowed)
        words = [_flag(name, value) for name, value in changes.items()]
        if limits.host_bytes is not None and host_bytes > limits.host_bytes:
            gib = max(_LEAST_RAM, 2 ** math.ceil(math.log2(host_bytes / _GIB)))
            words.append(f"--host-ram {gib}")
        return f" It fits with {' '.join(words)}." if words else ""
    return ""


def _changes(flags: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what to try: one thing more each time."""
    yield {}
    recompute = {} if flags["checkpointing"] else {"checkpointing": True}
    if recompute:
        yield recompute
    batch = flags["batch_size"]
    while batch is not None and batch > 1:
        batch //= 2
        yield {**recompute, "batch_size": batch}


def _flag(name: str, value: Any) -> str:
    flag = f"--{name.replace('_', '-')}"
    return flag if value is True else f"{flag} {value}"
