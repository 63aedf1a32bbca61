"""Breakdown of a ZeRO-Offload step's time: Llama-2-7B on 4 A100."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from experiments.lab.finding import Finding, Tolerance
from experiments.lab.study import Data, Job, computed
from experiments.paper import published as paper
from experiments.paper.canvas import canvas
from experiments.paper.speed.phases import simulated, table_costs
from sim.simulate import Strategy, simulate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FROM_PHASES = (
    "From the published phases: this checks the schedule, not the machine's figures. Each phase "
    "is spread evenly over 32 layers, and the last layer's copy follows backward."
)
_FROM_TABLE = (
    "From the table of hardware: the update at DRAM's bandwidth, copies at what one PCIe 4 x16 "
    "link measures, for 6.74 G parameters on one link as published. DeepSpeed's CPU step is far "
    "below its roofline, which is why the update here is so much shorter."
)


def _make(job: Job) -> Data:
    del job
    from_phases = simulated("published_zero_offload")
    from_table = simulate(table_costs(), Strategy.of("published_zero_offload"))
    busy = from_phases.timeline.by_name()
    steps = round(from_phases.timeline.makespan / from_phases.step_seconds)
    return {
        "from_phases": {
            "step_seconds": from_phases.step_seconds,
            "idle_seconds": from_phases.stall_seconds,
            "forward": busy["device", "forward"] / steps,
            "backward": busy["device", "backward"] / steps,
            **{name: from_phases.busy_seconds[name] for name in ("d2h", "host", "h2d")},
        },
        "from_table": {name: from_table.busy_seconds[name] for name in ("d2h", "host", "h2d")},
    }


def _findings(data: Data) -> Sequence[Finding]:
    ours, table = data["from_phases"], data["from_table"]
    share = ours["idle_seconds"] / ours["step_seconds"]
    schedule, part = Tolerance.relative(0.05), Tolerance.relative(0.15)
    return [
        paper.OFFLOAD_IDLE.beside(
            "A ZeRO-Offload step of Llama-2-7B leaves the GPU idle for 5100 ms",
            schedule, simulated=ours["idle_seconds"] * 1e3, note=_FROM_PHASES,
        ),
        paper.OFFLOAD_STEP.beside(
            "The step takes 7145 ms",
            schedule, simulated=ours["step_seconds"] * 1e3, note=_FROM_PHASES,
        ),
        paper.IDLE_SHARE.beside(
            "The GPU is idle for more than 60 % of the step",
            Tolerance.at_least(), simulated=share, note=_FROM_PHASES,
        ),
        paper.D2H.beside(
            "Gradients take 500 ms to the host",
            part, simulated=table["d2h"] * 1e3, note=_FROM_TABLE,
        ),
        paper.H2D.beside(
            "Weights take 500 ms back", part, simulated=table["h2d"] * 1e3, note=_FROM_TABLE
        ),
        paper.UPDATE.beside(
            "The CPU's update takes 4600 ms",
            part, simulated=table["host"] * 1e3, note=_FROM_TABLE,
        ),
    ]  # fmt: skip


def _draw(data: Data) -> Figure:
    from experiments.output.plots import SPAN_COLOURS, STALL_COLOUR

    ours, table, phases = data["from_phases"], data["from_table"], paper.BREAKDOWN
    rows = {
        "published": (
            phases.forward, phases.backward, phases.d2h, phases.update, phases.h2d,
            phases.update + phases.h2d,
        ),
        "simulated from\nthe published phases": (
            *(ours[name] for name in ("forward", "backward", "d2h", "host", "h2d")),
            ours["idle_seconds"],
        ),
        "published compute,\nsimulated copies and update\nfrom hardware's figures": (
            ours["forward"], ours["backward"], table["d2h"], table["host"], table["h2d"],
            table["host"] + table["h2d"],
        ),
    }  # fmt: skip
    title = "One ZeRO-Offload step of Llama-2-7B, 4x A100 (published and simulated; ms)"
    figure, axes = canvas((11, 4.2), title, title_size=12)
    forward, backward, d2h, update, h2d, idle = np.array(list(rows.values())).T
    places, computed = np.arange(len(rows)), forward + backward
    # Gradients leave inside backward, so they are drawn below it.
    for name, label, start, length, shift in (
        ("forward", "forward", 0.0, forward, -0.18),
        ("backward", "backward", forward, backward, -0.18),
        ("grads", "gradients d2h", computed - d2h, d2h, 0.18),
        ("adam", "CPU AdamW", computed, update, 0.18),
        ("params", "weights h2d", computed + update, h2d, 0.18),
    ):
        bars = axes.barh(places + shift, length, left=start, height=0.32,
                         color=SPAN_COLOURS[name], label=label)  # fmt: skip
        texts = [f"{seconds * 1e3:.0f}" if seconds > 0.1 else "" for seconds in length]
        axes.bar_label(bars, texts, label_type="center", fontsize=9)
    bars = axes.barh(places - 0.18, idle, left=computed, height=0.32, color=STALL_COLOUR,
                     alpha=0.25)  # fmt: skip
    texts = [f"GPU idle {seconds * 1e3:.0f} ms" for seconds in idle]
    axes.bar_label(bars, texts, label_type="center", fontsize=9, color=STALL_COLOUR)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    figure.legend(ncols=5, frameon=False, loc="outside lower center", fontsize=9)
    return figure


STUDY = computed(
    group="paper",
    name="breakdown",
    number=1,
    title="Breakdown of a ZeRO-Offload step",
    make=_make,
    findings=_findings,
    draw=_draw,
    minutes=0.1,
    exact=True,
)
