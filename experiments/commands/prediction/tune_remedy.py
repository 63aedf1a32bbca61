"""Remedies where no setting of a model fits a machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from autotune.constraints import Constraints, Feasibility
from autotune.offline.backends import AbstractBackend
from autotune.space import SearchSpace
from experiments.request.request import Request

Simulation = Callable[[Request], tuple[AbstractBackend, Constraints]]
"""Maker of the backend, and of the limits that the machine sets, for another request."""

_GIB = 1 << 30
_LEAST_RAM = 64


def remedy(
    request: Request, simulation: Simulation, space: SearchSpace, *, bounds_host: bool
) -> str:
    """Return a sentence with the flags that make some setting fit, or nothing if none do.

    Checkpointing, more host memory and a smaller batch are tried, in this order.

    Args:
        request: Machine and model for which nothing was found.
        simulation: Makes backend and limits of another request.
        space: Where a setting is looked for.
        bounds_host: Whether the host's memory was bounded by hand: more of it is no remedy.
    """
    for changes in _changes(request):
        backend, limits = simulation(replace(request, **changes))
        others = limits if bounds_host else replace(limits, host_bytes=None)
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


def _changes(request: Request) -> Iterator[dict[str, Any]]:
    """Yield the remedies to try, each with one more change than the last."""
    yield {}
    recompute: dict[str, Any] = {} if request.checkpointing else {"checkpointing": True}
    if recompute:
        yield recompute
    batch = request.batch_size
    while batch > 1:
        batch //= 2
        yield {**recompute, "batch_size": batch}


def _flag(name: str, value: Any) -> str:
    flag = f"--{name.replace('_', '-')}"
    return flag if value is True else f"{flag} {value}"
