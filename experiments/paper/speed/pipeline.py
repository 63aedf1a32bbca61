"""ZenFlow's pipeline over three windows, as lanes, and the shortest window that hides the host."""

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

    from zenflow.trace.timeline import Timeline

_WINDOWS = 3
_RULES = {
    "zenflow_paper": "as published: windows end together, an update lands a window later",
    "zenflow": "this project's default: rolling windows, an update lands a step later",
}
_INTERVALS = range(1, 9)
_FREE = 0.01
"""Share of a step that counts as no stall."""


def _make(job: Job) -> Data:
    del job
    stalls = {name: {str(s): _stall(name, s) for s in _INTERVALS} for name in _RULES}
    return {"spans_ms": {name: packed(_windows(name)) for name in _RULES}, "stall_share": stalls}


def _windows(name: str) -> Timeline:
    """Return three windows of the steady state."""
    prediction = simulated(name, num_steps=(_WINDOWS + 1) * paper.UPDATE_INTERVAL)
    return steady(prediction, _WINDOWS * paper.UPDATE_INTERVAL * prediction.step_seconds)


def _stall(name: str, interval: int) -> float:
    prediction = simulated(name, update_interval=interval)
    return prediction.stall_seconds / prediction.step_seconds


def _shortest(data: Data, name: str) -> int:
    stalls = data["stall_share"][name]
    return min((int(key) for key, share in stalls.items() if share <= _FREE), default=0)


def _findings(data: Data) -> Sequence[Finding]:
    exactly = Tolerance.absolute(0.0)
    note = f"{NOTE} Free of stall: less than {_FREE:.0%} of a step."
    return [
        paper.NO_IDLE_SHARE.beside(
            "At S = 4 no update is waited for", Tolerance.absolute(_FREE),
            simulated=data["stall_share"]["zenflow_paper"]["4"], note=note,
        ),
        paper.LEAST_INTERVAL_128.beside(
            "S = 3 is the shortest window that hides the update and its upload", exactly,
            simulated=_shortest(data, "zenflow_paper"),
            note=f"{note} This project's default rule: S = {_shortest(data, 'zenflow')}.",
        ),
    ]  # fmt: skip


def _draw(data: Data) -> Figure:
    from experiments.output.plots import STRATEGY_COLOURS, draw_lanes, lane_legend, mark_steps

    figure, (*panels, last) = canvas(
        (13, 7.6),
        "ZenFlow's pipeline, Llama-2-7B on 4x A100: simulated from the published phases (k = 0.1, "
        "S = 4)",
        rows=3,
        height_ratios=[1, 1, 0.8],
    )
    timelines = {name: unpacked(spans) for name, spans in data["spans_ms"].items()}
    for axes, (name, timeline) in zip(panels, timelines.items(), strict=True):
        draw_lanes(axes, timeline)
        mark_steps(axes, timeline)
        axes.set_xlim(0, timeline.makespan)
        axes.set_xlabel("seconds")
        axes.set_title(_RULES[name], loc="left", fontsize=10, pad=14)
    lane_legend(figure, list(timelines.values()))
    for name, stalls in data["stall_share"].items():
        last.plot([int(key) for key in stalls], [100 * share for share in stalls.values()],
                  marker="o", color=STRATEGY_COLOURS[name],
                  label=_RULES[name].partition(":")[0])  # fmt: skip
    last.axvline(3, color="#999999", linestyle=":")
    last.text(3.05, last.get_ylim()[1] * 0.8, "S = 3: published minimum", fontsize=8)
    last.set_xlabel("steps of a window, S")
    last.set_ylabel("GPU idle, % of a step")
    last.legend(frameon=False, fontsize=9)
    return figure


STUDY = computed(
    group="paper",
    name="pipeline",
    number=4,
    title="ZenFlow's pipeline over three windows",
    make=_make,
    findings=_findings,
    draw=_draw,
    minutes=0.1,
    exact=True,
)
