"""Utilisation of the GPU over 30 seconds, under ZeRO-Offload and under ZenFlow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from experiments.lab.finding import Finding, Tolerance
from experiments.lab.study import Data, Job, computed
from experiments.paper import published as paper
from experiments.paper.canvas import canvas
from experiments.paper.speed.phases import NOTE, simulated

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from zenflow.trace.timeline import Timeline

_SECONDS = 30.0
_BIN = 0.25
_STRATEGIES = {"published_zero_offload": "ZeRO-Offload", "zenflow_paper": "ZenFlow, as published"}
_READ = (
    "The blog's trace was read off its picture, and its machine is not named: its 2.5 to 3 busy "
    "seconds don't agree with the 2.05 of the blog's own figure 3, from which this is simulated."
)


def _make(job: Job) -> Data:
    del job
    found: Data = {"bin_seconds": _BIN}
    for strategy in _STRATEGIES:
        steps = math.ceil(_SECONDS / simulated(strategy, num_steps=4).step_seconds) + 1
        prediction = simulated(strategy, num_steps=steps)
        found[strategy] = {
            "step_seconds": prediction.step_seconds,
            "idle_seconds": prediction.stall_seconds,
            "utilisation": _utilisation(prediction.timeline),
        }
    return found


def _utilisation(timeline: Timeline) -> list[float]:
    """Return the device's busy share of each bin of the first 30 seconds."""
    start, found = timeline.start, []
    for place in range(round(_SECONDS / _BIN)):
        inside = timeline.between(start + place * _BIN, start + (place + 1) * _BIN)
        busy = inside.busy("device") if "device" in inside.lanes else 0.0
        found.append(round(min(1.0, busy / _BIN), 4))
    return found


def _findings(data: Data) -> Sequence[Finding]:
    offload, flow = (data[strategy] for strategy in _STRATEGIES)
    busy = offload["step_seconds"] - offload["idle_seconds"]
    tenth = Tolerance.relative(0.1)
    mean = sum(flow["utilisation"]) / len(flow["utilisation"])
    return [
        paper.UTILISATION_PERIOD.beside(
            "ZeRO-Offload's utilisation repeats every 7 s", tenth,
            simulated=offload["step_seconds"], note=_READ,
        ),
        paper.UTILISATION_BUSY.beside(
            "In each period the GPU is busy for 2.5 to 3 s", tenth, simulated=busy, note=_READ
        ),
        paper.UTILISATION_IDLE.beside(
            "In each period the GPU is idle for 4 to 4.5 s", tenth,
            simulated=offload["idle_seconds"], note=_READ,
        ),
        paper.STALL_FREE.beside(
            "Under ZenFlow the GPU is always busy", Tolerance.absolute(0.02), simulated=mean,
            note=NOTE,
        ),
    ]  # fmt: skip


def _draw(data: Data) -> Figure:
    from experiments.output.plots import STRATEGY_COLOURS

    title = "GPU utilisation, Llama-2-7B on 4x A100: simulated from the published phases"
    figure, panels = canvas((11, 4.6), title, len(_STRATEGIES), sharex=True)
    colours = (STRATEGY_COLOURS["zero_offload"], STRATEGY_COLOURS["zenflow_paper"])
    for axes, (strategy, title), colour in zip(panels, _STRATEGIES.items(), colours, strict=True):
        shares = [100 * share for share in data[strategy]["utilisation"]]
        edges = [place * data["bin_seconds"] for place in range(len(shares) + 1)]
        axes.stairs(shares, edges, fill=True, color=colour, alpha=0.35)
        axes.stairs(shares, edges, color=colour, linewidth=1.2)
        mean = sum(shares) / len(shares)
        step = data[strategy]["step_seconds"]
        axes.set_title(
            f"{title}: {step:.2f} s a step, the GPU {mean:.0f} % busy", loc="left", fontsize=10
        )
        axes.set_ylim(0, 108)
        axes.set_ylabel("GPU busy, %")
    panels[-1].set_xlim(0, _SECONDS)
    panels[-1].set_xlabel(f"seconds (shares of {data['bin_seconds']:g} s)")
    return figure


STUDY = computed(
    group="paper",
    name="utilisation",
    number=2,
    title="GPU utilisation over 30 seconds",
    make=_make,
    findings=_findings,
    draw=_draw,
    minutes=0.1,
    exact=True,
)
