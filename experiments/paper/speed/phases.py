"""The paper's breakdown of Llama-2-7B on 4 A100, simulated from its phases under a strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from experiments.paper import published as paper
from sim.hardware.catalog import find_machine
from sim.models.table import find_model
from sim.models.workload import Workload
from sim.simulate import Prediction, Strategy, simulate
from sim.timing.costs import StepCosts, costs_of
from sim.timing.phases import costs_of_phases
from zenflow.trace.timeline import Span, Timeline

NOTE = (
    "Simulated from the published phases, each spread evenly over 32 layers: this checks the "
    "schedules, not the machine's figures."
)
_JOINED = 2e-3
"""Seconds between two spans of one name below which a picture shows one."""


def simulated(strategy: str, *, num_steps: int | None = None, **knobs: Any) -> Prediction:
    """Return a strategy's steady state with the published phases."""
    phases = {name: value for name, value in asdict(paper.BREAKDOWN).items() if name != "strategy"}
    costs = costs_of_phases(**phases)
    return simulate(costs, Strategy.of(strategy, **knobs), num_steps=num_steps)


def steady(prediction: Prediction, seconds: float) -> Timeline:
    """Return so much of a prediction's timeline, from its second window on.

    By then what the steps before have set off is in the picture as well.
    """
    start = prediction.timeline.start + paper.UPDATE_INTERVAL * prediction.step_seconds
    return prediction.timeline.between(start, start + seconds)


def table_costs() -> StepCosts:
    """Return the costs of a step of Llama-2-7B on one A100, from the table of hardware."""
    workload = Workload.of_config(*find_model("llama-2-7b"), batch_size=4, sequence=512)
    return costs_of(workload, find_machine("a100-epyc-7742", 1))


def packed(timeline: Timeline) -> list[list[Any]]:
    """Return spans as JSON lists, those of one name in one step joined where nothing is between.

    Times count from the first span, in milliseconds to two decimals.
    """
    joined: dict[tuple[str, str, int], list[list[float]]] = {}
    for span in sorted(timeline.spans, key=lambda span: span.start):
        runs = joined.setdefault((span.lane, span.name, span.step), [])
        if runs and span.start - runs[-1][1] <= _JOINED:
            runs[-1][1] = max(runs[-1][1], span.end)
        else:
            runs.append([span.start, span.end])
    origin = timeline.start
    return [
        [lane, name, step, round((start - origin) * 1e3, 2), round((end - origin) * 1e3, 2)]
        for (lane, name, step), runs in joined.items()
        for start, end in runs
    ]


def unpacked(spans: Sequence[Sequence[Any]]) -> Timeline:
    """Return the timeline of what `packed` returned."""
    return Timeline(
        tuple(
            Span(lane=lane, name=name, start=start / 1e3, end=end / 1e3, step=step)
            for lane, name, step, start, end in spans
        )
    )
