"""The window that Zen-auto chooses over a run: measured, from scratch and in fine-tuning.

What it decides follows from gradients alone, so nothing here depends on timing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING

from experiments.lab.finding import Finding, Tolerance
from experiments.lab.study import Data, Job, computed
from experiments.paper import published as paper
from experiments.paper.canvas import canvas

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STEPS = {"from scratch": 500, "fine-tuning": 300}
_WITHIN = Tolerance.absolute(0.5)
_COLOURS = {"from scratch": "#d95f02", "fine-tuning": "#1b9e77"}


def _make(job: Job) -> Data:
    from evidence.paper.loss import small_runs as paper_training

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


def _first_tenth(intervals: Sequence[int]) -> Sequence[int]:
    return intervals[: max(1, round(0.1 * len(intervals)))]


def _last_half(intervals: Sequence[int]) -> Sequence[int]:
    return intervals[-max(1, round(0.5 * len(intervals))) :]


def _findings(data: Data) -> Sequence[Finding]:
    return [
        published.beside(
            f"Zen-auto's windows {when}, {name}: mean S of the {part}",
            _WITHIN,
            measured=fmean(part_of(run["intervals"])),
            note=f"S from {min(run['intervals'])} to {max(run['intervals'])}; it starts at 1. "
            "How long windows get follows from how far the gradient of an important column "
            "exceeds that of a deferred one, and small models concentrate theirs less (see "
            f"gradient concentration). Held-out loss "
            f"{run['eval_loss'] / run['device_eval_loss'] - 1:+.1%} against the device alone.",
        )
        for name, run in data["runs"].items()
        for when, part, part_of, published in (
            ("are short early on", "first tenth", _first_tenth, paper.AUTO_EARLY),
            ("are longer once training is stable", "last half", _last_half, paper.AUTO_LATE),
        )
    ]


def _draw(data: Data) -> Figure:
    from experiments.output.plots import smoothed

    title = "The window that Zen-auto chooses, measured on a CPU"
    figure, panels = canvas(
        (11, 4.2), title, columns=len(data["runs"]), title_size=12, sharey=True
    )
    highest = max(max(run["intervals"]) for run in data["runs"].values())
    for axes, (name, run) in zip(panels, data["runs"].items(), strict=True):
        steps = range(1, 1 + len(run["intervals"]))
        axes.step(steps, run["intervals"], where="mid", color=_COLOURS[name], linewidth=2)
        axes.set_title(f"{name}, {len(run['intervals'])} steps", fontsize=11)
        axes.set_xlabel("step")
        axes.set_ylim(0, highest + 1)
        beside = axes.twinx()
        beside.plot(steps, smoothed(run["loss"]), color="#777777", linewidth=1)
        beside.set_ylabel("training loss, smoothed (thin)", color="#777777")
        beside.spines["top"].set_visible(False)
    panels[0].set_ylabel("steps in a window, S (thick)")
    return figure


STUDY = computed(
    group="paper",
    name="zen_auto",
    number=11,
    title="Zen-auto's window over a run",
    make=_make,
    findings=_findings,
    draw=_draw,
    minutes=1.7,
)
