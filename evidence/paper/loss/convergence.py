"""Held-out loss against steps and against time, over an emulated link.

Loss by step is measured: it does not depend on timing, but for the tuned run's. Times are
emulated. The rounds differ in seed and go through the strategies in opposite order, so that a
machine that gets slower favours none.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from experiments.lab.finding import Finding, Tolerance
from experiments.lab.study import Data, Job, computed
from experiments.paper.canvas import canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STEPS, _EVERY, _ROUNDS = 240, 20, 2
_STRATEGIES = ("on_device", "zero_offload", "delayed", "zenflow_paper", "zenflow", "auto")
_SOURCE = (
    "ZenFlow paper (arXiv 2505.12242), figure 14: loss and accuracy of OPT-350M against steps and "
    "time; no number readable"
)
_EMULATED = "Emulated link on a CPU."
_SAME = 0.005
"""Relative difference of losses that counts as none."""


def _make(job: Job) -> Data:
    from evidence.paper.loss import small_runs as paper_training

    rounds = 1 if job.smoke else _ROUNDS
    shared = paper_training.with_link(job, paper_training.fine_tuning(job, _STEPS))
    shared = replace(shared, eval_every=2 if job.smoke else _EVERY)
    curves: dict[str, list[dict[str, Any]]] = {name: [] for name in _STRATEGIES}
    for number in range(rounds):
        for place, name in enumerate(_STRATEGIES if number % 2 == 0 else _STRATEGIES[::-1]):
            job.progress((number + place / len(_STRATEGIES)) / rounds, f"{name}, {number + 1}")
            settings = replace(shared, seed=job.seed + number)
            if name == "auto":
                settings = replace(settings, strategy="zenflow", controller="twin")
            else:
                settings = replace(settings, strategy=name)
            run = paper_training.run(job, f"{name}-{number}", settings)
            curves[name].append(_curve(run))
    return {"training": paper_training.describe(shared), "curves": curves}


def _curve(run: Any) -> dict[str, Any]:
    """Return steps and seconds at which the held-out loss was looked at, evaluations left out."""
    steps, seconds, losses, elapsed = [], [], [], 0.0
    for row in run.rows:
        elapsed += row["seconds"]
        if row.get("eval_loss") is not None:
            steps.append(row["step"])
            seconds.append(elapsed)
            losses.append(row["eval_loss"])
    if not steps or steps[-1] != run.rows[-1]["step"]:
        steps.append(run.rows[-1]["step"])
        seconds.append(elapsed)
        losses.append(run.summary["eval_loss"])
    stalled = sum(row["stall_seconds"] for row in run.rows)
    return {
        "steps": steps, "seconds": seconds, "eval_loss": losses, "stall_share": stalled / elapsed,
    }  # fmt: skip


def reached(curve: Mapping[str, Any], loss: float) -> float | None:
    """Return after how many seconds a curve first has this loss, straight between points.

    None if it never has.
    """
    points = list(zip(curve["seconds"], curve["eval_loss"], strict=True))
    if points[0][1] <= loss:
        return float(points[0][0])
    for (earlier, above), (later, below) in itertools.pairwise(points):
        if below <= loss:
            return float(earlier + (above - loss) / (above - below) * (later - earlier))
    return None


def speedup(data: Data, name: str) -> float | None:
    """Return how many times sooner a strategy has zero_offload's final loss than it itself.

    That is, or is near it by `_SAME`. The mean over rounds; None where one does not get there.
    """
    ratios = []
    for base, own in zip(data["curves"]["zero_offload"], data["curves"][name], strict=True):
        goal = base["eval_loss"][-1] * (1 + _SAME)
        when, before = reached(own, goal), reached(base, goal)
        if when is None or before is None:
            return None
        ratios.append(before / when)
    return fmean(ratios)


def final(data: Data, name: str, other: str = "zero_offload") -> float:
    """Return the final loss over another strategy's of the same round, mean over rounds."""
    pairs = zip(data["curves"][name], data["curves"][other], strict=True)
    return fmean(own["eval_loss"][-1] / base["eval_loss"][-1] for own, base in pairs)


def _findings(data: Data) -> Sequence[Finding]:
    found = []
    for name, text in (
        ("zenflow_paper", "the published rule"), ("zenflow", "the default rule"),
        ("auto", "the tuned run"),
    ):  # fmt: skip
        sooner, least = speedup(data, name), final(data, name)
        missed = "It does not get there: 0." if sooner is None else ""
        found += [
            Finding(
                claim=f"After as many steps the loss is ZeRO-Offload's ({text})",
                source=_SOURCE, unit="x", published=1.0, tolerance=Tolerance.at_most(_SAME),
                measured=None if name == "auto" else least,
                emulated=least if name == "auto" else None,
                note=f"Held-out loss over zero_offload's, mean of {len(data['curves'][name])} "
                f"seeds; {_SAME:.1%} counts as none.",
            ),
            Finding(
                claim=f"ZeRO-Offload's loss, but for {_SAME:.1%}, is reached sooner ({text})",
                source=_SOURCE, unit="x", published=1.0, tolerance=Tolerance.at_least(),
                emulated=0.0 if sooner is None else sooner, note=f"{_EMULATED} {missed}".strip(),
            ),
        ]  # fmt: skip
    return found


def _draw(data: Data) -> Figure:
    figure, (left, right) = canvas(
        (13, 4.8),
        "Convergence: fine-tuning a 0.8 M parameter decoder on a CPU over an emulated link, "
        f"runs of {len(data['curves']['zenflow'])} seeds",
        columns=2,
        title_size=12,
        sharey=True,
    )
    _draw_curves(left, data, "steps")
    _draw_curves(right, data, "seconds")
    left.set_xlabel("step (loss is measured)")
    right.set_xlabel("training seconds (emulated link)")
    left.set_ylabel("held-out loss")
    right.legend(fontsize=9, frameon=False)
    return figure


def _draw_curves(axes: Axes, data: Data, against: str) -> None:
    from experiments.output.plots import STRATEGY_COLOURS

    for name, rounds in data["curves"].items():
        for number, curve in enumerate(rounds):
            axes.plot(curve[against], curve["eval_loss"], color=STRATEGY_COLOURS[name],
                      linewidth=1.4, alpha=1.0 if number == 0 else 0.45,
                      label=f"{name} ({fmean(c['stall_share'] for c in rounds):.0%} stalled)"
                      if number == 0 else None)  # fmt: skip
            axes.plot(curve[against][-1], curve["eval_loss"][-1], marker="o", markersize=5,
                      color=STRATEGY_COLOURS[name])  # fmt: skip


STUDY = computed(
    group="paper",
    name="convergence",
    number=12,
    title="Convergence against steps and time",
    make=_make,
    findings=_findings,
    draw=_draw,
    minutes=5.0,
)
