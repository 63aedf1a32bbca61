"""Stability limits by window, and the curvature that trainings meet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.lab.drawing import panels
from experiments.lab.study import Data

ADAMW, FRESH, FORMER, LATE = "AdamW", "with the fresh gradient", "former rule", "late step"
BEST_LEAD = "late step, best lead"
_COLOURS: Mapping[str, str] = {
    ADAMW: "#444444",
    FRESH: "#1b9e77",
    BEST_LEAD: "#b8860b",
    FORMER: "#d95f02",
    LATE: "#7570b3",
}
_MARKERS: Mapping[int, str] = {1: "o", 4: "o", 16: "s"}


def draw(data: Data) -> Figure:
    """Return limits on the left and what is met on the right, on one scale."""
    figure, (left, right) = panels(
        10.5, 4.4, 2, sharey=True, title="How steep a direction may be, and how steep it gets"
    )
    _draw_limits(left, data["limits"])
    _draw_runs(right, data["runs"])
    left.set_ylabel("learning rate x preconditioned curvature")
    return figure


def _draw_limits(axes: Axes, limits: Mapping[str, Mapping[str, float]]) -> None:
    axes.axhline(limits[ADAMW]["1"], color=_COLOURS[ADAMW], linewidth=1.2, linestyle="--")
    axes.annotate("AdamW without delay", (1, limits[ADAMW]["1"]), (0, 4), fontsize=8,
                  textcoords="offset points")  # fmt: skip
    shown: set[int] = set()
    for name in (FRESH, BEST_LEAD, FORMER, LATE):
        own = {int(interval): value for interval, value in limits.get(name, {}).items()}
        shown |= set(own)
        axes.plot(list(own), list(own.values()), color=_COLOURS[name], marker="o", markersize=4,
                  label=name)  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted(shown)
    axes.set_xticks(ticks, [str(interval) for interval in ticks])
    axes.set_xlabel("steps in a window, S")
    axes.set_title("stable up to", fontsize=11)
    axes.legend(fontsize=8, frameon=False, loc="lower left")


def _draw_runs(axes: Axes, runs: list[Mapping[str, Any]]) -> None:
    """Draw each run; what is not positive, a direction that curves down, is left out."""
    named: set[tuple[str, int]] = set()
    for run in runs:
        place = run["rule"], run["interval"]
        points = [(step, value) for step, value in run["points"] if value > 0]
        label = run["rule"] if run["rule"] == ADAMW else f"{run['rule']}, S = {run['interval']}"
        axes.plot(
            [step for step, _ in points], [value for _, value in points],
            color=_COLOURS[run["rule"]], marker=_MARKERS[run["interval"]], markersize=4,
            linestyle="-" if run["interval"] <= 4 else ":",
            label=None if place in named else label,
        )  # fmt: skip
        named.add(place)
    axes.set_xlabel("step")
    axes.set_title("met in training from random weights", fontsize=11)
    axes.legend(fontsize=8, frameon=False, loc="lower left")
