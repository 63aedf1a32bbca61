"""Accumulated: a step of many micro-batches, by two steps of few.

Micro-batches in the middle of a step are alike. Each adds as much work to every lane, and as much
waiting or less. Simulating all of them would take minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

from sim.simulate import Prediction
from zenflow.trace.timeline import Timeline

REPLAYED, SIMULATED = (32, 64), (3, 6)
"""Numbers of micro-batches of the two steps that are simulated, by C code and by SimPy.

SimPy takes a hundred times as long."""
_OWN = ("strategy", "timeline", "step_seconds", "slowest_step_seconds", "stall_seconds")
"""Fields of a prediction that are no sum over micro-batches."""


def accumulated(
    predict: Callable[[int], Prediction], count: int, *, is_replayed: bool
) -> Prediction:
    """Return the prediction of a step of so many micro-batches.

    Work grows in a line from the two steps that are simulated. So does waiting, but not below
    nothing: a host that keeps the device waiting has more time with each micro-batch.

    Args:
        predict: Simulates a step of a number of micro-batches.
        count: Number of micro-batches.
        is_replayed: Whether C code simulates it: a step of the engine on one device.
    """
    few, more = REPLAYED if is_replayed else SIMULATED
    if count <= more:
        return predict(count)
    first, second = predict(few), predict(more)
    times = (count - more) / (more - few)

    def line(one: float, other: float) -> float:
        return max(0.0, other + times * (other - one))

    def line_of(one: Any, other: Any) -> Any:
        if isinstance(other, Mapping):
            return {name: line(one.get(name, 0.0), seconds) for name, seconds in other.items()}
        return line(one, other)

    sums: dict[str, Any] = {
        item.name: line_of(getattr(first, item.name), getattr(second, item.name))
        for item in fields(Prediction)
        if item.name not in _OWN
    }
    stalled = line(first.stall_seconds, second.stall_seconds)
    worked = (found.step_seconds - found.stall_seconds for found in (first, second))
    seconds = line(*worked) + stalled
    longer = second.slowest_step_seconds - second.step_seconds
    return replace(
        second,
        **sums,
        step_seconds=seconds,
        slowest_step_seconds=seconds + longer,
        stall_seconds=stalled,
        timeline=Timeline(),
    )
