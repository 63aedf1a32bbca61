"""Contribution of each ingredient: selection, interval, overlap, placement.

Simulated for the paper's machine from its published phases, simulated as released for the set-up
on which overlap was measured independently, and emulated here with the real engine.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from evidence.published.runs import published
from experiments.lab.finding import Finding, Range, Tolerance
from experiments.lab.study import Data, Job, computed
from experiments.paper.canvas import canvas
from experiments.paper.predictions import predict
from experiments.paper.setups import Measurement
from experiments.paper.speed.phases import simulated

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STEPS, _ROUNDS = 72, 3
_ISSUE = "deepspeedai/DeepSpeed #7478: Qwen2.5-3B on 2 A100, 1564 to 1381 ms and 1344 to 1217 ms"
_OVERLAP = Range(low=0.09, high=0.12)
_AT_ONCE = {"overlap_step": False}


_LABELS = {
    "offload": ("3B, ZeRO-Offload, cores not bound", "ZeRO-Offload"),
    "offload, bound": ("3B, ZeRO-Offload, bound", "ZeRO-Offload,\ncores bound"),
    "in turn": ("3B, ZenFlow, no overlap", "ZenFlow,\nno overlap"),
    "overlap": ("3B, ZenFlow, overlap", "ZenFlow, overlap"),
    "in turn, bound": ("3B, ZenFlow, bound, no overlap", "no overlap,\ncores bound"),
    "overlap, bound": (
        "3B, ZenFlow, bound, overlap, two cores reserved", "overlap,\ncores bound",
    ),
}  # fmt: skip
"""Label of each measurement of the released code, the first of several, and its name in the
picture."""


@functools.cache
def _measured() -> Mapping[str, Measurement]:
    """Return the measurements of the released code by their names here."""
    rows = published().measurements
    return {
        name: next(item for item in rows if item.label == label)
        for name, (label, _) in _LABELS.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """A rule by what it has of the ingredients."""

    name: str
    strategy: str
    knobs: Mapping[str, Any] = field(default_factory=dict)
    is_alone: bool = False
    """One ingredient alone on top of ZeRO-Offload; else one on top of the others."""


RUNGS: tuple[Rung, ...] = (
    Rung(name="ZeRO-Offload", strategy="zero_offload"),
    Rung(name="selection alone", strategy="zero_offload", knobs={"topk_ratio": 0.1},
         is_alone=True),
    Rung(name="interval alone", strategy="zero_offload", knobs={"update_interval": 4},
         is_alone=True),
    Rung(name="overlap alone", strategy="delayed", is_alone=True),
    Rung(name="selection + interval", strategy="zenflow_paper", knobs=_AT_ONCE),
    Rung(name="+ overlap", strategy="zenflow_paper"),
    Rung(name="the default rule", strategy="zenflow"),
    Rung(name="no offload", strategy="on_device", is_alone=True),
)  # fmt: skip


def _make(job: Job) -> Data:
    return {
        "paper": _simulated(),
        "released": _released(),
        "emulated": _emulated(job),
    }


def _simulated() -> dict[str, dict[str, float]]:
    """Return step and stall of each rung on the paper's machine, from its published phases."""
    found = {}
    for rung in RUNGS:
        told = simulated(rung.strategy, **rung.knobs)
        found[rung.name] = {"step_seconds": told.step_seconds, "stall_seconds": told.stall_seconds}
    return found


def _released() -> dict[str, float]:
    """Return predicted steps of the released code where overlap was measured."""
    return {name: predict(item.setup, item.quantity) for name, item in _measured().items()}


def _emulated(job: Job) -> dict[str, Any]:
    """Return each rung's step here, the rounds one after another so that drift favours none."""
    from evidence.paper.loss import small_runs as paper_training

    shared = paper_training.with_link(job, paper_training.common(job, _STEPS))
    steps: dict[str, list[float]] = {rung.name: [] for rung in RUNGS}
    stalls: dict[str, list[float]] = {rung.name: [] for rung in RUNGS}
    rungs = RUNGS[:2] if job.smoke else RUNGS
    rounds = 1 if job.smoke else _ROUNDS
    for number in range(rounds):
        for place, rung in enumerate(rungs if number % 2 == 0 else rungs[::-1]):
            job.progress((number + place / len(rungs)) / rounds, rung.name)
            settings = replace(shared, strategy=rung.strategy, knobs=dict(rung.knobs))
            name = f"{rung.name} {number}".replace(" ", "_")
            rows = paper_training.settled(paper_training.run(job, name, settings))
            steps[rung.name].append(sum(row["seconds"] for row in rows) / len(rows))
            stalls[rung.name].append(sum(row["stall_seconds"] for row in rows) / len(rows))
    return {
        "training": paper_training.describe(shared),
        "rungs": {
            name: {
                "step_seconds": median(values),
                "least": min(values),
                "most": max(values),
                "stall_seconds": median(stalls[name]),
            }
            for name, values in steps.items()
            if values
        },
    }


def _cut(rungs: Mapping[str, Mapping[str, float]], before: str, after: str) -> float | None:
    """Return by which share of the step a rung is shorter than another; None if not run."""
    if before not in rungs or after not in rungs:
        return None
    return 1 - rungs[after]["step_seconds"] / rungs[before]["step_seconds"]


def _findings(data: Data) -> Sequence[Finding]:
    released = data["released"]
    measured = {name: 1e3 * item.seconds for name, item in _measured().items()}
    note = "Released code as simulated, without what it does in Python."

    def in_turn_share(steps: Mapping[str, float]) -> float:
        """Return how much of the gain on ZeRO-Offload comes without overlap."""
        return (steps["offload"] - steps["in turn"]) / (steps["offload"] - steps["overlap"])

    return [
        *(
            Finding(
                claim=f"Overlap alone shortens the released code's step by 9 to 12 % ({text})",
                source=_ISSUE,
                unit="of the step",
                published=_OVERLAP,
                tolerance=Tolerance.absolute(0.03),
                note=note,
                simulated=1 - released[f"overlap{key}"] / released[f"in turn{key}"],
            )
            for text, key in (("cores not bound", ""), ("cores bound", ", bound"))
        ),
        Finding(
            claim="Most of the released code's gain comes without overlap",
            source=f"{_ISSUE}; DeepSpeed blog zenflow-corebinding: ZeRO-Offload 2887 ms",
            unit="of the gain",
            published=in_turn_share(measured),
            tolerance=Tolerance.absolute(0.1),
            simulated=in_turn_share(released),
            note=note,
        ),
        Finding(
            claim="Binding cores to the nearest memory shortens ZeRO-Offload's step",
            source="DeepSpeed blog zenflow-corebinding: 2887 to 2497 ms, Qwen2.5-3B on 2 A100",
            unit="of the step",
            published=1 - measured["offload, bound"] / measured["offload"],
            tolerance=Tolerance.absolute(0.05),
            simulated=1 - released["offload, bound"] / released["offload"],
            note="Placement: only where memory lies is simulated.",
        ),
        *_engine_findings(data["emulated"]["rungs"], data["paper"]),
    ]


def _engine_findings(
    here: Mapping[str, Mapping[str, float]], paper: Mapping[str, Mapping[str, float]]
) -> list[Finding]:
    less_often = "selection + interval"
    return [
        Finding(
            claim="With the engine overlap brings more than the released code's 12 %, on top of "
            "updating less often",
            source=_ISSUE,
            unit="of the step",
            published=_OVERLAP.high,
            tolerance=Tolerance.at_least(),
            simulated=_cut(paper, less_often, "+ overlap"),
            emulated=_cut(here, less_often, "+ overlap"),
            note="Simulated: Llama-2-7B from its published phases. Emulated: 0.8 M parameters.",
        ),
        Finding(
            claim="Updating less often brings more than overlap alone does",
            source=f"{_ISSUE}: most of the gain is updating less often",
            unit="x of the cut",
            published=1.0,
            tolerance=Tolerance.at_least(),
            simulated=_over(paper, "interval alone", "overlap alone"),
            emulated=_over(here, "interval alone", "overlap alone"),
            note="Cut of ZeRO-Offload's step by either alone.",
        ),
    ]


def _over(rungs: Mapping[str, Mapping[str, float]], one: str, other: str) -> float | None:
    cuts = [_cut(rungs, "ZeRO-Offload", name) for name in (one, other)]
    if cuts[0] is None or not cuts[1]:
        return None
    return cuts[0] / cuts[1]


def _draw(data: Data) -> Figure:
    figure, (left, middle, right) = canvas(
        (15, 4.8),
        "What each ingredient contributes (red: the device waits; pale: one ingredient alone)",
        columns=3,
        title_size=12,
        width_ratios=[1.15, 1.15, 0.9],
    )
    _draw_rungs(left, data["paper"], 1.0, "seconds per step")
    left.set_title("Simulated: Llama-2-7B on 4x A100,\nfrom its published phases", fontsize=11)
    _draw_rungs(middle, data["emulated"]["rungs"], 1e3, "ms per step")
    middle.set_title("Emulated link: the engine on a CPU,\n0.8 M parameters", fontsize=11)
    _draw_released(right, data["released"])
    return figure


def _draw_rungs(
    axes: Axes, rungs: Mapping[str, Mapping[str, float]], scale: float, label: str
) -> None:
    from experiments.output.plots import SPAN_COLOURS, STALL_COLOUR

    names = [rung.name for rung in RUNGS if rung.name in rungs]
    alone = {rung.name for rung in RUNGS if rung.is_alone}
    for place, name in enumerate(names):
        step = scale * rungs[name]["step_seconds"]
        stall = min(step, scale * rungs[name]["stall_seconds"])
        alpha = 0.55 if name in alone else 1.0
        axes.barh(place, step - stall, color=SPAN_COLOURS["backward"], height=0.62, alpha=alpha)
        axes.barh(place, stall, left=step - stall, color=STALL_COLOUR, height=0.62, alpha=alpha)
        if "least" in rungs[name]:
            low, high = scale * rungs[name]["least"], scale * rungs[name]["most"]
            axes.hlines(place, low, high, color="#222222", linewidth=1.2)
            step = max(step, high)
        axes.text(step, place, f" {scale * rungs[name]['step_seconds']:.3g}", va="center",
                  fontsize=9)  # fmt: skip
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.margins(x=0.12)


def _draw_released(axes: Axes, released: Mapping[str, float]) -> None:
    """Draw the released code's measurements beside its predictions."""
    places = np.arange(len(_measured()))
    measured = [item.seconds for item in _measured().values()]
    for shift, seconds, colour, label in (
        (-0.19, measured, "#7f8c99", "measured by others"),
        (0.19, [released[name] for name in _measured()], "#9fc8b8", "simulated here"),
    ):
        bars = axes.barh(places + shift, np.multiply(1e3, seconds), color=colour, height=0.36,
                         label=label)  # fmt: skip
        axes.bar_label(bars, fmt=" {:.0f}", fontsize=8)
    texts = [text for _, text in _LABELS.values()]
    axes.set_yticks(places, texts, fontsize=9)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel("ms per step")
    axes.set_title("The released code:\nQwen2.5-3B on 2x A100", fontsize=11)
    axes.legend(fontsize=8, frameon=False, loc="lower right")


STUDY = computed(
    group="paper",
    name="ingredients",
    number=13,
    title="What each ingredient contributes",
    make=_make,
    findings=_findings,
    draw=_draw,
    minutes=3.0,
)
