"""Differences to AdamW by seed with their intervals: a panel for each model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.lab.drawing import panels
from experiments.lab.intervals import CONFIDENCE, Equivalence

Group = Mapping[str, Any]
_COLOURS = ("#1b9e77", "#7570b3", "#e7298a", "#d95f02")
_BAND = "#e8f0ec"


def draw(groups: Sequence[Group], tested: Callable[[Group], Equivalence | None]) -> Figure:
    """Return a panel for each model: dots are seeds, bars intervals, bands the margins.

    Args:
        groups: Of a model, a task and a rule each.
        tested: Function that returns a group's test, or None where there is nothing to show.
    """
    models = list(dict.fromkeys(group["model"] for group in groups))
    shown = [group for group in groups if tested(group) is not None]
    lines = max((sum(g["model"] == model for g in shown) for model in models), default=1)
    figure, found = panels(2 + 5 * len(models), 1.5 + 0.35 * max(lines, 3), count=len(models))
    rules = list(dict.fromkeys(group["variant"] for group in shown))
    for model, axes in zip(models, found, strict=True):
        axes.set_title(model.removeprefix("package:"), fontsize=11)
        own = [group for group in shown if group["model"] == model]
        for line, group in enumerate(own):
            test = tested(group)
            assert test is not None
            _draw_line(axes, line, group, test, _COLOURS[rules.index(group["variant"]) % 4])
        axes.axvline(0, color="#444444", linewidth=1)
        axes.set_yticks(range(len(own)), [f"{g['task']}, {g['variant']}" for g in own], fontsize=8)
        axes.invert_yaxis()
        axes.set_xlabel(
            f"points beside AdamW (dots: seeds; bar: {CONFIDENCE:.0%}; band: margin)", fontsize=9
        )
    return figure


def _draw_line(axes: Axes, line: int, group: Group, test: Equivalence, colour: str) -> None:
    axes.barh(line, 2 * test.margin, left=-test.margin, height=0.8, color=_BAND, zorder=0)
    low, high = test.interval
    if math.isfinite(low):
        axes.hlines(line, low, high, colour, linewidth=3, alpha=0.6)
    axes.scatter(group["points"], [line] * len(group["points"]), color=colour, s=16, zorder=3)
