"""Streams: layers that visit the device, where nothing else fits one, or fits it as well.

Weights that are away leave the device's memory to activations, so that micro-batches may be larger
or nothing is computed twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from sim.hardware.profile import HardwareProfile
from sim.machine import Rates
from sim.memory.engine_parts import Visiting
from sim.memory.need import MemoryNeed
from sim.models.recomputation import Recomputation
from sim.models.workload import Workload
from sim.planning.chunks import loss_is_ours
from sim.planning.grid import INTERVALS
from sim.planning.options import Option, Planner, variants
from sim.schedules.streams import Streams, layers_of
from sim.simulate import Strategy
from sim.timing.costs import StepCosts
from zenflow.config import ZenFlowConfig
from zenflow.host_state import gradient_bytes

FASTER = 1.05
"""Speed-up that streams must bring where weights that stay fit too."""


def can_stream(hardware: HardwareProfile) -> bool:
    """Whether weights can visit the device, and states be on a drive: one GPU has both."""
    return hardware.total_devices == 1 and not hardware.device.is_cpu


def with_streams(
    planner: Planner,
    workload: Workload,
    *,
    before: Option | None = None,
    checkpointing: Recomputation | None = None,
    may_chunk: bool = True,
    knobs: Mapping[str, Any] | None = None,
) -> Option | None:
    """Return a step of streamed weights that is likely to fit; None if there is none.

    Logits come in chunks where they may, and `zenflow train` has them. The largest micro-batch
    counts first, as visits cost the same for each. Then as many layers stay as fit. Where the host
    has too little room, fewer gradients wait there, then its state is compact, and then windows
    are longer, whose uploads take less of its memory.

    Args:
        planner: Planner of one device.
        workload: Step as asked for.
        before: Best option whose weights stay. Streams are worth less where they are not faster,
            unless that one has fewer tokens to a step, or may not fit. None for none.
        checkpointing: What backward recomputes; None tries all, and nothing too where weights
            that stay leave streams something to win.
        may_chunk: Whether logits may come in chunks.
        knobs: Settings of the update rule that are held, besides k.
    """
    if may_chunk and loss_is_ours(workload):
        workload = replace(workload, loss="chunks")
    held = {**(knobs or {}), "topk_ratio": 0, "uploads": "all"}
    states = ("float32", "compact") if "host_state" not in held else (held["host_state"],)
    depths = (None, 2, 1) if "queue_depth" not in held else (held["queue_depth"],)
    intervals = (held["update_interval"],) if "update_interval" in held else INTERVALS
    rules = [
        {**held, "host_state": state, "queue_depth": depth, "update_interval": interval}
        for interval in intervals
        for state in states
        for depth in depths
    ]
    tried: tuple[Recomputation, ...] = (True,) if before is None else (True, False)
    if checkpointing is not None:
        tried = (checkpointing,)
    least = _least_speed(workload, before)
    found: list[Option] = []
    for rule in rules:
        for recomputed in tried:
            option = _largest(planner, workload, recomputed, rule, least)
            found += [] if option is None else [option]
        if found:
            break
    best = max(found, key=lambda option: option.tokens_per_second, default=None)
    return None if best is None or best.tokens_per_second <= least else best


def _least_speed(workload: Workload, before: Option | None) -> float:
    """Return the tokens per second that streams have to exceed beside another option."""
    if before is None or not before.fits:
        return 0.0
    if before.need.workload.tokens_per_step < workload.tokens_per_step:
        return 0.0
    return FASTER * before.tokens_per_second


def _largest(
    planner: Planner,
    workload: Workload,
    checkpointing: Recomputation,
    rule: Mapping[str, Any],
    least: float,
) -> Option | None:
    """Return the option of the largest micro-batches that fit; None if none does.

    None too if compute alone is too slow for so many tokens per second.
    """
    for work, words in _steps(workload, checkpointing):
        if work.tokens_per_step <= least * planner.costs(work).compute_seconds:
            return None  # smaller micro-batches are no faster
        need = _fullest(planner, work, rule)
        if need is None:
            continue
        assert need.strategy.streams is not None
        most = need.strategy.streams.resident_layers
        if most == len(layers_of(work.layers)):
            return None  # none has to visit
        found = planner.option_of(need)
        usual = ZenFlowConfig().to_dict()
        changes = [
            f"{name}={value}" if name in usual else name
            for name, value in rule.items()
            if value != usual.get(name)
        ]
        changes += ["stream"] if most == 0 else ["stream", f"resident_layers={most}"]
        return replace(found, changes=(*changes, *words))
    return None


def _steps(
    workload: Workload, checkpointing: Recomputation
) -> Iterator[tuple[Workload, tuple[str, ...]]]:
    """Yield the step as asked for, then in smaller micro-batches, each in words.

    Weights visit for each micro-batch. So smaller ones are worth nothing where layers could be
    recomputed instead, and less than inputs of recomputed layers that wait on the host.
    """
    whole = replace(
        workload,
        batch_size=workload.batch_size * workload.accumulation,
        accumulation=1,
        checkpointing=checkpointing,
    )
    found = variants(whole, recomputes=False)
    for work, words in found if checkpointing else found[:1]:
        yield work, words
        if work.recomputes_all and not work.offloads_activations:
            yield replace(work, offloads_activations=True), (*words, "offload_activations")


def _fullest(planner: Planner, workload: Workload, rule: Mapping[str, Any]) -> MemoryNeed | None:
    """Return the memory of a step that as many layers stay for as a device is likely to have room.

    None where not even none may stay, or the host has too little room. Layers that stay take
    nothing of the host, so that fewer would not help.
    """
    low, high = -1, len(layers_of(workload.layers))
    fullest, short = None, {}
    while low < high:
        middle = (low + high + 1) // 2
        streams = Streams(resident_layers=middle)
        need = planner.need(workload, Strategy.of("zenflow", **rule, streams=streams))
        places = need.short_of(planner.hardware, planner.reserve, planner.chance)
        if "device" in places:
            high = middle - 1
        else:
            low, fullest, short = middle, need, places
    return None if short else fullest


def hiding_tokens(need: MemoryNeed, costs: StepCosts) -> int:
    """Return the least tokens of a micro-batch whose passes take as long as weights travel.

    Passes take a time in proportion to their tokens. The device waits for copies in forward, whose
    weights come, and in backward, whose weights come and go beside gradients and updates. Layers
    that are still there at the turns are not counted, and neither is the host's work.

    Args:
        need: Memory of a step of streamed weights.
        costs: Costs of that step.
    """
    work, config = need.workload, need.strategy.config
    assert config is not None
    rates, size = Rates.of(costs.hardware), work.dtype_bytes
    visiting = Visiting.of(work, need.strategy.streams).at_home
    deferred = (1.0 - config.topk_ratio) * work.num_params
    up = visiting + size * deferred / config.update_interval
    down = visiting + gradient_bytes(config.gradient_link, size) * deferred
    ratio = max(
        visiting / rates.h2d / costs.forward_seconds,
        max(up / rates.h2d, down / rates.d2h, (up + down) / rates.duplex) / costs.backward_seconds,
    )
    return math.ceil(ratio * work.batch_size * work.sequence)
