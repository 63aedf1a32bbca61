"""Streams: layers that visit the device, where no other setting fits one device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from sim.models.workload import Workload
from sim.planning.chunks import loss_is_ours
from sim.planning.options import Option, Planner, variants
from sim.schedules.streams import Streams, layers_of
from sim.simulate import Strategy
from zenflow.host_state import HostState


def with_streams(planner: Planner, workload: Workload) -> Option | None:
    """Return a step of streamed weights that is likely to fit; None if there is none.

    Layers are recomputed, and logits come in chunks where `zenflow train` has them. The largest
    micro-batch counts first, as visits cost the same for each. Then as many layers stay as fit.
    Compact state is tried where the host has no room for float32.

    Args:
        planner: Planner of one device.
        workload: Step as asked for.
    """
    for host_state in ("float32", "compact"):
        for work, words in _steps(workload):
            chosen = _option(planner, work, host_state, 0)
            if chosen is None:
                continue
            most = _most_resident(planner, work, host_state)
            found = chosen if most == 0 else _option(planner, work, host_state, most) or chosen
            changes = ["topk_ratio=0"]
            changes += [] if host_state == "float32" else [f"host_state={host_state}"]
            changes += ["stream"] if most == 0 else ["stream", f"resident_layers={most}"]
            return replace(found, changes=(*changes, *words))
    return None


def _steps(workload: Workload) -> Iterator[tuple[Workload, tuple[str, ...]]]:
    """Yield the step as asked for, then in smaller micro-batches, each in words."""
    if loss_is_ours(workload):
        workload = replace(workload, loss="chunks")
    whole = replace(
        workload,
        batch_size=workload.batch_size * workload.accumulation,
        accumulation=1,
        checkpointing=True,
    )
    yield from variants(whole, recomputes=False)


def _strategy(host_state: HostState, resident_layers: int) -> Strategy:
    return Strategy.of(
        "zenflow",
        topk_ratio=0,
        host_state=host_state,
        streams=Streams(resident_layers=resident_layers),
    )


def _option(
    planner: Planner, workload: Workload, host_state: HostState, resident_layers: int
) -> Option | None:
    """Return the option of a step; None where it is not likely to fit."""
    need = planner.need(workload, _strategy(host_state, resident_layers))
    if need.short_of(planner.hardware, planner.reserve, planner.chance):
        return None
    return planner.option_of(need)


def _most_resident(planner: Planner, workload: Workload, host_state: HostState) -> int:
    """Return the largest number of layers that may stay; with none the step fits."""
    low, high = 0, len(layers_of(workload.layers))
    while low < high:
        middle = (low + high + 1) // 2
        need = planner.need(workload, _strategy(host_state, middle))
        if need.short_of(planner.hardware, planner.reserve, planner.chance):
            high = middle - 1
        else:
            low = middle
    return low
