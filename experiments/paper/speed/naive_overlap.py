"""Overlapping the update with one step is not enough: naive one-step overlap against ZenFlow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from experiments.lab.finding import Finding, Tolerance
from experiments.lab.study import Data, Job, computed
from experiments.paper import published as paper
from experiments.paper.canvas import canvas
from experiments.paper.speed.phases import NOTE, packed, simulated, steady, unpacked

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STRATEGIES = {
    "published_zero_offload": "ZeRO-Offload",
    "published_delayed": "one-step overlap",
    "zenflow_paper": "ZenFlow, as published",
}
_SHOWN_SECONDS = 14.4
"""Two steps of ZeRO-Offload."""


def _make(job: Job) -> Data:
    del job
    found: Data = {}
    for strategy in _STRATEGIES:
        prediction = simulated(strategy, num_steps=16)
        found[strategy] = {
            "step_seconds": prediction.step_seconds,
            "idle_seconds": prediction.stall_seconds,
            "spans_ms": packed(steady(prediction, _SHOWN_SECONDS)),
        }
    return found


def _findings(data: Data) -> Sequence[Finding]:
    naive, flow = data["published_delayed"], data["zenflow_paper"]
    near = Tolerance.relative(0.05)
    return [
        paper.NAIVE_IDLE.beside(
            "With one-step overlap the GPU still idles for 2555 ms of each step", near,
            simulated=naive["idle_seconds"] * 1e3, note=NOTE,
        ),
        paper.NAIVE_IDLE_SHARE.beside(
            "Which is 56 % of the step", near,
            simulated=naive["idle_seconds"] / naive["step_seconds"], note=NOTE,
        ),
        paper.NO_IDLE.beside(
            "ZenFlow leaves none of it", Tolerance.absolute(20.0),
            simulated=flow["idle_seconds"] * 1e3, note=NOTE,
        ),
        paper.STALL_FREE_STEP.beside(
            "A step of ZenFlow takes what forward and backward take", near,
            simulated=flow["step_seconds"] * 1e3, note=NOTE,
        ),
    ]  # fmt: skip


def _draw(data: Data) -> Figure:
    from experiments.output.plots import draw_lanes, lane_legend

    title = "Llama-2-7B on 4x A100, simulated from the published phases (k = 0.1, S = 4)"
    figure, panels = canvas((12, 6.6), title, len(_STRATEGIES), sharex=True)
    timelines = [unpacked(data[strategy]["spans_ms"]) for strategy in _STRATEGIES]
    for axes, (strategy, title), timeline in zip(
        panels, _STRATEGIES.items(), timelines, strict=True
    ):
        draw_lanes(axes, timeline)
        step, idle = data[strategy]["step_seconds"] * 1e3, data[strategy]["idle_seconds"] * 1e3
        axes.set_title(
            f"{title}: {step:.0f} ms a step, the GPU idle for {idle:.0f} ms of it", loc="left",
            fontsize=10,
        )  # fmt: skip
    panels[-1].set_xlim(0, _SHOWN_SECONDS)
    panels[-1].set_xlabel("seconds")
    lane_legend(figure, timelines)
    return figure


STUDY = computed(
    group="paper",
    name="naive_overlap",
    number=3,
    title="Naive one-step overlap against ZenFlow",
    make=_make,
    findings=_findings,
    draw=_draw,
    minutes=0.1,
    exact=True,
)
