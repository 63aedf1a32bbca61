"""Reduction of ZeRO-Offload's stall, per model and machine, and over an emulated link."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from experiments.lab.finding import Finding, Tolerance
from experiments.lab.record import committed
from experiments.lab.study import Data, Job, computed
from experiments.paper import published as paper
from experiments.paper.speed import offload_runs
from experiments.paper.speed.offload_runs import draw_bars, judged, stall_removed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NOTE = (
    f"{offload_runs.NOTE} Where forward and backward are short, four steps of them don't hide the "
    "update at that rate, and a longer window would be needed."
)
_EMULATED = (
    "This project's default rule, a small model on a CPU over an emulated link on which "
    "ZeRO-Offload stalls for more than half of the time; the least of the seeds. Record: "
)


def _make(job: Job) -> Data:
    return {
        "rows": offload_runs.simulated(job.smoke, job.progress),
        "emulated": _emulated(),
    }


def _emulated() -> Data | None:
    """Return the share removed by the engine, by seed, from the newest committed record."""
    found = committed("stall_and_loss")
    if found is None:
        return None
    stalls = {(r["variant"], r["seed"]): _stalled(r["summary"]) for r in found.rows}
    seeds = sorted({seed for variant, seed in stalls if variant == "zero_offload"})
    removed = {
        str(seed): 1 - stalls["zenflow", seed] / stalls["zero_offload", seed] for seed in seeds
    }
    return {"record": found.folder.name, "removed": removed}


def _stalled(summary: Data) -> float:
    """Return the mean stall of a step, seconds."""
    return float(summary["stall_fraction"] * summary["mean_step_seconds"])


def _findings(data: Data) -> Sequence[Finding]:
    at_claims = judged(data["rows"])
    shares = [stall_removed(row) for row in at_claims]
    longer = [stall_removed(row) for row in data["rows"] if row not in at_claims]
    published, emulated = paper.STALL_REDUCTION, data["emulated"]
    found = [
        published.beside(
            f"ZenFlow removes more than 85 % of {what}",
            Tolerance.at_least(),
            simulated=share,
            note=_NOTE,
        )
        for what, share in (
            ("ZeRO-Offload's stall, on the mean over models and machines", fmean(shares)),
            ("it for every model on every machine", min(shares)),
            ("it for every one of them with longer sequences", min(longer)),
        )
    ]
    if emulated is not None:
        found.append(
            published.beside(
                "The engine removes more than 85 % of ZeRO-Offload's stall",
                Tolerance.at_least(),
                emulated=min(emulated["removed"].values()),
                note=f"{_EMULATED}{emulated['record']}.",
            )
        )
    return found


def _draw(data: Data) -> Figure:
    from matplotlib.figure import Figure

    from experiments.output.plots import STRATEGY_COLOURS

    figure = Figure(figsize=(12.5, 6.6), layout="constrained")
    panels = figure.subplot_mosaic(
        [[machine, "emulated"] for machine in paper.MACHINES], width_ratios=[5, 1]
    )
    for axes in panels.values():
        axes.axhline(
            85, color="#555555", linestyle="--", linewidth=1, label="published: over 85 %"
        )
        axes.set_ylim(0, 128)
        axes.set_yticks(range(0, 101, 20))
        axes.spines[["top", "right"]].set_visible(False)
    for machine in paper.MACHINES:
        axes = panels[machine]
        draw_bars(axes, data["rows"], machine, lambda item: 100 * stall_removed(item), ".0f")
        axes.set_ylabel("stall removed, %")
    panels[paper.MACHINES[0]].legend(fontsize=8, frameon=False, ncols=4, loc="upper right")
    axes = panels["emulated"]
    removed = data["emulated"]["removed"] if data["emulated"] else {}
    axes.bar(list(removed), [100 * share for share in removed.values()],
             color=STRATEGY_COLOURS["zenflow"], width=0.6)  # fmt: skip
    axes.set_xlabel("seed")
    axes.set_title("emulated: the engine\non a CPU", fontsize=10)
    figure.suptitle(
        "Share of ZeRO-Offload's stall that ZenFlow is without (k = 0.1, S = 4), simulated by "
        "tokens of a sequence; right: emulated\nbelow each model: GPUs and sequences of a step "
        "(* assumed)",
        fontsize=11,
    )
    return figure


STUDY = computed(
    group="paper",
    name="stall_reduction",
    number=6,
    title="Stall reduction per model and host",
    make=_make,
    findings=_findings,
    draw=_draw,
    minutes=0.3,
    exact=True,
)
