"""Drives: AdamW's states on a drive, where the host has too little memory for them.

Fewer gradients that wait take less of the host, and more passes of the drive. So each number of
them is tried, and weights visit the device where they must.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from sim.models.recomputation import Recomputation
from sim.models.workload import Workload
from sim.planning.chunks import loss_is_ours
from sim.planning.options import Option, Planner
from sim.planning.streams import with_streams
from sim.simulate import Strategy
from zenflow.presets import ZERO_INFINITY

FASTER = 1.05
"""Speed-up that compact state must bring where float32 state on the drive fits too."""
DEPTHS = (4, 2, 1)
"""Numbers of a column's gradients, q, that may wait; each has S / q passes in a window."""
Way = Callable[[Planner, Workload, Mapping[str, Any], Recomputation | None], Option | None]
"""Search for a step by a rule's settings."""
MANY_STEPS = 1000
"""Number of steps whose wear a plan tells."""


def with_drive(
    planner: Planner,
    workload: Workload,
    *,
    before: Option | None = None,
    is_asked: bool = False,
    may_stream: bool = True,
    checkpointing: Recomputation | None = None,
    may_chunk: bool = True,
    knobs: Mapping[str, Any] | None = None,
) -> Option | None:
    """Return the fastest step with states on a drive that is likely to fit; None if there is none.

    State is compact only where nothing fits without, or where that is `FASTER`. None too where
    states in memory leave nothing to win: a fit, tokens of a step, or states that are not rounded.

    Args:
        planner: Planner of one device, whose machine has drives.
        workload: Step as asked for.
        before: Best option whose states are in memory; None if nothing may fit.
        is_asked: Whether states on a drive are asked for, whatever there is to win.
        may_stream: Whether layers may visit the device where states on a drive are not enough.
        checkpointing: What backward recomputes; None tries nothing and all.
        may_chunk: Whether logits may come in chunks.
        knobs: Settings of the update rule that are held, besides k.
    """
    held = {**(knobs or {}), "uploads": "all"}
    if before is not None and before.fits and not is_asked:
        config = before.strategy.config
        if "host_state" not in held and config is not None and config.is_compact:
            held["host_state"] = "float32"
        elif before.need.workload.tokens_per_step >= workload.tokens_per_step:
            return None
    if may_chunk and loss_is_ours(workload):
        workload = replace(workload, loss="chunks")
    if checkpointing is not None:
        workload = replace(workload, checkpointing=checkpointing)
    states = [held.pop("host_state")] if "host_state" in held else ["float32", "compact"]
    depths = [held.pop("queue_depth")] if "queue_depth" in held else DEPTHS
    ways: list[Way] = [_without_streams, *([_with_streams] if may_stream else [])]
    for way in ways:
        best: Option | None = None
        for state in states:
            rules = [{**held, "host_state": state, "queue_depth": depth} for depth in depths]
            fastest = _fastest(way, planner, workload, rules, checkpointing)
            if fastest is not None and (best is None or _speed(fastest) > FASTER * _speed(best)):
                best = fastest
        if best is not None:
            return best
    return None


def zero_infinity(planner: Planner, option: Option) -> Option:
    """Return the step of ZeRO-Infinity for an option's workload: the baseline of a drive."""
    return planner.fitted(option.need.workload, Strategy.of(ZERO_INFINITY), recomputes=False)


def _speed(option: Option) -> float:
    return option.tokens_per_second


def _fastest(
    way: Way,
    planner: Planner,
    workload: Workload,
    rules: Iterable[Mapping[str, Any]],
    checkpointing: Recomputation | None,
) -> Option | None:
    """Return the fastest step by any of these rules; None if none is likely to fit.

    A rule whose passes of the drive take too long by themselves is not searched for.
    """
    fastest: Option | None = None
    for rule in rules:
        if fastest is not None:
            most = _most_speed(planner, fastest, rule["queue_depth"], workload)
            if most <= _speed(fastest):
                continue
        found = way(planner, workload, rule, checkpointing)
        if found is not None and (fastest is None or _speed(found) > _speed(fastest)):
            fastest = found
    return fastest


def _most_speed(planner: Planner, option: Option, depth: int, workload: Workload) -> float:
    """Return the tokens per second that drives allow where so many gradients may wait, at most.

    Each q steps take one pass of all states or more, which moves as many bytes as the option's.
    """
    config, found, nvme = option.strategy.config, option.prediction, planner.hardware.nvme
    assert config is not None
    assert found is not None
    assert nvme is not None
    window = config.update_interval
    passes = math.ceil(window / option.need.queue_depth) / window
    more = 1 / depth / passes
    reads, writes = more * found.drive_read_bytes, more * found.drive_written_bytes
    seconds = max(reads / nvme.read.value, writes / nvme.write.value)
    return workload.tokens_per_step / seconds


def _without_streams(
    planner: Planner,
    workload: Workload,
    rule: Mapping[str, Any],
    checkpointing: Recomputation | None,
) -> Option | None:
    """Return a step by a rule that is likely to fit, all of its weights on the device."""
    strategy = Strategy.of("zenflow", **{**rule, "topk_ratio": 0, "state_on_drive": True})
    option = planner.fitted(workload, strategy, recomputes=checkpointing is None)
    if not option.fits:
        return None
    words = ["topk_ratio=0", f"queue_depth={rule['queue_depth']}", "state_on_drive"]
    words += [f"{name}={value}" for name, value in rule.items() if _is_told(name, value)]
    return replace(option, changes=(*words, *option.changes))


def _with_streams(
    planner: Planner,
    workload: Workload,
    rule: Mapping[str, Any],
    checkpointing: Recomputation | None,
) -> Option | None:
    """Return a step by a rule that is likely to fit, whose layers visit the device."""
    return with_streams(
        planner, workload, checkpointing=checkpointing, may_chunk=False,
        knobs={**rule, "state_on_drive": True},
    )  # fmt: skip


def _is_told(name: str, value: Any) -> bool:
    return name != "queue_depth" and (name, value) != ("host_state", "float32")


def written_bytes(option: Option, num_steps: int = MANY_STEPS) -> float:
    """Return the bytes that so many steps of an option write to the drives."""
    return 0.0 if option.prediction is None else num_steps * option.prediction.drive_written_bytes
