"""The window that Zen-auto chooses over a run: measured, from scratch and in fine-tuning.

What it decides follows from gradients alone, so nothing here depends on timing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from experiments.reproduction.figure import Data, Job, PaperFigure
from experiments.reproduction.finding import Finding, Tolerance

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STEPS = {"from scratch": 500, "fine-tuning": 300}
_SOURCE = (
    "ZenFlow paper (arXiv 2505.12242): early in training windows are short, later longer; its "
    "trace's numbers were not readable"
)
_EARLY, _LATE = 0.1, 0.5
"""Shares of a run: its first tenth against its last half."""
_COLOURS = {"from scratch": "#d95f02", "fine-tuning": "#1b9e77"}


def _make(job: Job) -> Data:
    from experiments.reproduction import paper_training

    runs = {}
    for place, (name, steps) in enumerate(_STEPS.items()):
        job.progress(place / len(_STEPS), name)
        of = paper_training.common if name == "from scratch" else paper_training.fine_tuning
        settings = of(job, steps)
        tuned = replace(settings, controller="zen-auto")
        auto = paper_training.run(job, f"{name} auto".replace(" ", "-"), tuned)
        base = replace(settings, strategy="on_device")
        device = paper_training.run(job, f"{name} device".replace(" ", "-"), base)
        runs[name] = {
            "training": paper_training.describe(settings),
            "intervals": [row["update_interval"] for row in auto.rows],
            "loss": [row["loss"] for row in auto.rows],
            "eval_loss": auto.summary["eval_loss"],
            "device_eval_loss": device.summary["eval_loss"],
        }
    return {"runs": runs}


def lengthening(intervals: Sequence[int]) -> float:
    """Return the mean S of a run's last half over that of its first tenth."""
    early = intervals[: max(1, round(_EARLY * len(intervals)))]
    late = intervals[-max(1, round(_LATE * len(intervals))) :]
    return fmean(late) / fmean(early)


def _findings(data: Data) -> Sequence[Finding]:
    return [
        Finding(
            claim=f"Zen-auto's windows grow while training goes on ({name}): mean S of the last "
            "half over the first tenth",
            source=_SOURCE,
            unit="x",
            tolerance=Tolerance(kind="at least", amount=0.0),
            published=1.5,
            measured=lengthening(run["intervals"]),
            note=f"S from {min(run['intervals'])} to {max(run['intervals'])}, "
            f'{run["intervals"][-1]} at the end; it starts at 1. "Longer" is taken as half as '
            f"long again. Held-out loss {run['eval_loss'] / run['device_eval_loss'] - 1:+.1%} "
            "against the device alone.",
        )
        for name, run in data["runs"].items()
    ]


def _draw(data: Data) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    panels = figure.subplots(1, len(data["runs"]), squeeze=False, sharey=True)[0]
    highest = max(max(run["intervals"]) for run in data["runs"].values())
    for axes, (name, run) in zip(panels, data["runs"].items(), strict=True):
        steps = range(1, 1 + len(run["intervals"]))
        axes.step(steps, run["intervals"], where="mid", color=_COLOURS[name], linewidth=2)
        axes.set_title(f"{name}, {len(run['intervals'])} steps", fontsize=11)
        axes.set_xlabel("step")
        axes.set_ylim(0, highest + 1)
        axes.spines[["top", "right"]].set_visible(False)
        _draw_loss(axes, run)
    panels[0].set_ylabel("steps in a window, S (thick)")
    figure.suptitle("The window that Zen-auto chooses, measured on a CPU", fontsize=12)
    return figure


def _draw_loss(axes: Any, run: Mapping[str, Any]) -> None:
    from experiments.plots import smoothed

    beside = axes.twinx()
    beside.plot(range(1, 1 + len(run["loss"])), smoothed(run["loss"]), color="#777777",
                linewidth=1)  # fmt: skip
    beside.set_ylabel("training loss, smoothed (thin)", color="#777777")
    beside.spines["top"].set_visible(False)


FIGURE = PaperFigure(
    name="zen_auto",
    number=11,
    title="Zen-auto's window over a run",
    make=_make,
    findings=_findings,
    draw=_draw,
    minutes=1.7,
)
