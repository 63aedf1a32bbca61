"""The paper's models on its machines, simulated under ZeRO-Offload and ZenFlow.

What is compared is what the paper compared: ZeRO-Offload as DeepSpeed runs it, and ZenFlow's
published design with DeepSpeed's CPU step. That step's rate is the measured constant of
`experiments.paper.predictions`, on both machines.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from experiments.paper import published as paper
from experiments.paper.predictions import deepspeed_rate, predict_costs
from sim.hardware.catalog import find_machine
from sim.hardware.profile import HardwareProfile
from sim.models.table import find_model
from sim.models.workload import Workload
from sim.planning.options import Planner
from sim.simulate import Strategy
from sim.timing.costs import costs_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SEQUENCES = (128, 512, 2048)
JUDGED = SEQUENCES[0]
"""Tokens of a sequence at which claims are judged."""
NOTE = (
    f"The paper's sequence length is not known: judged at {JUDGED} tokens, usual for its GLUE "
    "tasks; longer ones give the GPU more to do and all ratios fall. Its global batches are known "
    "for three models; 64 on one GPU is assumed for the others. Checkpointing and micro-batches "
    "as far as the GPU's memory asks for them. DeepSpeed's CPU step is taken to be as fast per "
    "parameter as in the paper's breakdown, on both hosts. The published design is simulated with "
    "each device's part of the host's state: one device with all links and the whole host."
)
_OFFLOAD = Strategy.of("deepspeed_zero_offload")
_ZENFLOW = Strategy.of(
    "zenflow_paper", topk_ratio=paper.TOPK_RATIO, update_interval=paper.UPDATE_INTERVAL
)
_BATCH = (1, 64)
"""Devices and global batch of the models whose own is not known."""
_COLOURS = ("#1b9e77", "#7fc8b2", "#c9e7dd")
_TITLES = {"a100-epyc-7742": "4x A100, EPYC 7742", "h100-xeon-8462y": "4x H100, Xeon 8462Y"}


def simulated(smoke: bool, progress: Callable[[float, str], None]) -> list[dict[str, Any]]:
    """Return a row for each machine, model and sequence length."""
    cases = list(itertools.product(paper.MACHINES, paper.MODELS, SEQUENCES))
    if smoke:
        cases = [case for case in cases if case[1] == paper.MODELS[0]]
    rows = []
    for number, (machine, model, sequence) in enumerate(cases):
        progress(number / len(cases), f"{model}, {machine}")
        row = _row(machine, model, sequence)
        if row is not None:
            rows.append(row)
    return rows


def _row(machine: str, model: str, sequence: int) -> dict[str, Any] | None:
    """Return the step and the stall of both, seconds; None where no micro-batch fits."""
    devices, batch = paper.SET_UPS.get(model, _BATCH)
    name, config = find_model(model)
    asked = Workload.of_config(name, config, batch_size=batch // devices, sequence=sequence)
    alone = find_machine(machine, 1)
    fitted = Planner(alone, chance=0.0).fitted(asked, _ZENFLOW)
    if any(short.place == "device" for short in fitted.shortfalls):
        return None
    workload, rate = fitted.need.workload, deepspeed_rate()
    offload = costs_of(workload, find_machine(machine, devices))
    zenflow = costs_of(workload, _with_links(alone, devices))
    # Each device fetches its part of all weights, for forward and again for backward.
    fetches = 2 * workload.model_bytes / devices / alone.link.h2d.value
    offload_step = predict_costs(offload, _OFFLOAD, "step", rate)
    return {
        "machine": machine,
        "model": model,
        "devices": devices,
        "global_batch": batch,
        "sequence": sequence,
        "changes": list(fitted.changes),
        "compute_seconds": offload.compute_seconds,
        "zero_offload": {
            "step_seconds": offload_step,
            "stall_seconds": predict_costs(offload, _OFFLOAD, "stall", rate),
        },
        "zenflow": {
            "step_seconds": predict_costs(zenflow, _ZENFLOW, "step", rate),
            "stall_seconds": predict_costs(zenflow, _ZENFLOW, "stall", rate),
        },
        "zero_infinity_bound_seconds": offload_step + fetches * workload.accumulation,
    }


def _with_links(alone: HardwareProfile, devices: int) -> HardwareProfile:
    """Return one device that stands for several: their links together, and the host once."""
    figures = alone.quantities()
    return alone.with_values(
        {name: figures[name].value * devices for name in ("link.d2h", "link.h2d")}
    )


def judged(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows at the sequence length of the claims."""
    return [row for row in rows if row["sequence"] == JUDGED]


def speedup(row: dict[str, Any]) -> float:
    """Return the step of ZeRO-Offload over that of ZenFlow."""
    return float(row["zero_offload"]["step_seconds"] / row["zenflow"]["step_seconds"])


def over_infinity(row: dict[str, Any]) -> float:
    """Return the bound of ZeRO-Infinity's step over the step of ZenFlow."""
    return float(row["zero_infinity_bound_seconds"] / row["zenflow"]["step_seconds"])


def stall_removed(row: dict[str, Any]) -> float:
    """Return the share of ZeRO-Offload's stall that ZenFlow is without."""
    return float(1 - row["zenflow"]["stall_seconds"] / row["zero_offload"]["stall_seconds"])


def draw_bars(
    axes: Axes,
    rows: Sequence[dict[str, Any]],
    machine: str,
    value: Callable[[Any], float],
    form: str,
) -> None:
    """Draw one machine's bars: a colour for each sequence length, values in ``form``."""
    for shift, (sequence, colour) in enumerate(zip(SEQUENCES, _COLOURS, strict=True)):
        heights = {
            paper.MODELS.index(row["model"]) + 0.27 * (shift - 1): value(row)
            for row in rows
            if (row["machine"], row["sequence"]) == (machine, sequence)
        }
        bars = axes.bar(list(heights), list(heights.values()), width=0.25, color=colour,
                        label=f"{sequence} tokens")  # fmt: skip
        axes.bar_label(bars, fmt=f"{{:{form}}}", fontsize=7)
    axes.set_xticks(
        range(len(paper.MODELS)), [_named(model) for model in paper.MODELS], fontsize=8
    )
    axes.set_title(_TITLES[machine], loc="left", fontsize=10)


def _named(model: str) -> str:
    devices, batch = paper.SET_UPS.get(model, _BATCH)
    known = "" if model in paper.SET_UPS else "*"
    return f"{model}\n{devices} GPU{'s' if devices > 1 else ''}, {batch}{known}"
