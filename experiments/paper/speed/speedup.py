"""Speed-up over ZeRO-Offload and ZeRO-Infinity, for the paper's models on its machines."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, cast

from experiments.lab.finding import Finding, Tolerance
from experiments.lab.study import Data, Job, computed
from experiments.paper import published as paper
from experiments.paper.canvas import canvas
from experiments.paper.predictions import predict
from experiments.paper.speed import offload_runs
from experiments.paper.speed.offload_runs import draw_bars, judged, over_infinity, speedup

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NEAR = Tolerance.relative(0.15)
"""Share within which the simulator's predictions of published measurements aim to be."""
_BOUND = (
    "ZeRO-Infinity without drives is no schedule of the simulator: here it is ZeRO-Offload with "
    "all weights fetched for forward and again for backward, each time waited for. With prefetch "
    "it would be faster, so this is the most that ZenFlow can gain on it. "
)
_RELEASED = (
    "The released code, which is not the published design, with cores bound: both steps are "
    "predicted as in docs/validation.md."
)


def _make(job: Job) -> Data:
    (offload, offload_seconds), (zenflow, zenflow_seconds) = paper.RELEASED_RUNS
    released = {
        "measured_by_others": offload_seconds / zenflow_seconds,
        "simulated": predict(offload, "step") / predict(zenflow, "step"),
    }
    return {"rows": offload_runs.simulated(job.smoke, job.progress), "released_3b": released}


def _findings(data: Data) -> Sequence[Finding]:
    rows = judged(data["rows"])
    gains = [speedup(row) for row in rows]
    return [
        paper.SMALLEST_CUT.beside(
            "The smallest speed-up over ZeRO-Offload is 2.9x", _NEAR, simulated=min(gains),
            note=offload_runs.NOTE,
        ),
        paper.LARGEST_CUT.beside(
            "The largest is 5x", _NEAR, simulated=max(gains), note=offload_runs.NOTE
        ),
        paper.MEAN_OVER_OFFLOAD.beside(
            "The mean over models and machines is 4.3x", _NEAR, simulated=fmean(gains),
            note=offload_runs.NOTE,
        ),
        paper.MEAN_OVER_INFINITY.beside(
            "The mean over ZeRO-Infinity is 6.3x", _NEAR,
            simulated=fmean(over_infinity(row) for row in rows), note=_BOUND + offload_runs.NOTE,
        ),
        paper.RELEASED_3B.beside(
            "Released code, Qwen2.5-3B on 2 A100 40 GB: 2.24x", _NEAR,
            simulated=data["released_3b"]["simulated"], note=_RELEASED,
        ),
    ]  # fmt: skip


def _draw(data: Data) -> Figure:
    figure, panels = canvas(
        (12, 7),
        "Speed-up over ZeRO-Offload, simulated, by tokens of a sequence (the paper's are not "
        "known)\nbelow each model: GPUs and sequences of a step (* assumed)",
        len(paper.MACHINES),
        sharey=True,
    )
    published = (paper.SMALLEST_CUT, paper.LARGEST_CUT, paper.MEAN_OVER_OFFLOAD)
    low, high, mean = (cast(float, number.value) for number in published)
    for axes, machine in zip(panels, paper.MACHINES, strict=True):
        band = axes.axhspan(low, high, color="#eeeeee", zorder=0)
        draw_bars(axes, data["rows"], machine, speedup, ".1f")
        line = axes.axhline(mean, color="#555555", linestyle="--", linewidth=1)
        axes.axhline(1, color="#999999", linewidth=0.8)
        axes.set_ylabel("ZeRO-Offload's step over ZenFlow's")
    bars, labels = panels[0].get_legend_handles_labels()
    panels[0].legend(
        [*bars, band, line],
        [*labels, "published range of single results", "published mean"],
        fontsize=8, frameon=False, ncols=5, loc="upper right",
    )  # fmt: skip
    panels[0].set_ylim(0, 6)
    return figure


STUDY = computed(
    group="paper",
    name="speedup",
    number=5,
    title="Speed-up over ZeRO-Offload and ZeRO-Infinity",
    make=_make,
    findings=_findings,
    draw=_draw,
    minutes=0.3,
    exact=True,
)
