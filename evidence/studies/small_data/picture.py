"""Curves of training loss, test loss and accuracy by step, a column of panels for each task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evidence.studies.small_data.design import ADAMW, PLAIN
from experiments.lab.study import Data

_STYLES: Mapping[str, tuple[str, str]] = {
    ADAMW: ("#444444", "-"),
    "zenflow, S = 4": ("#1b9e77", "-"),
    f"{PLAIN}, S = 4": ("#1b9e77", ":"),
    "zenflow, S = 16": ("#d95f02", "-"),
    f"{PLAIN}, S = 16": ("#d95f02", ":"),
}
"""Colour and dash of each rule that is drawn."""
_HEADS = ("training loss", "test loss", "accuracy")


def draw(data: Data) -> Figure:
    """Return mean curves over the seeds: rows are quantities, columns are tasks."""
    tasks = list(dict.fromkeys(group["task"] for group in data["groups"]))
    figure = Figure(figsize=(1.2 + 3.6 * len(tasks), 7.5), layout="constrained")
    panels = figure.subplots(len(_HEADS), len(tasks), squeeze=False, sharex="col")
    figure.suptitle("Fine-tuning on few sentences, mean over seeds", fontsize=12)
    for column, task in enumerate(tasks):
        own = {g["variant"]: g for g in data["groups"] if g["task"] == task}
        for row, head in enumerate(_HEADS):
            axes: Axes = panels[row][column]
            axes.spines[["top", "right"]].set_visible(False)
            for name, (colour, dash) in _STYLES.items():
                if name in own:
                    _draw_curve(axes, own[name], row + 1, name, colour, dash)
            if column == 0:
                axes.set_ylabel(head)
        panels[0][column].set_title(task, fontsize=11)
        panels[-1][column].set_xlabel("step")
    panels[0][0].legend(fontsize=8, frameon=False)
    return figure


def _draw_curve(
    axes: Axes, group: Mapping[str, Any], place: int, name: str, colour: str, dash: str
) -> None:
    steps = [point[0] for point in group["curve"]]
    values = [point[place] for point in group["curve"]]
    axes.plot(steps, values, color=colour, linestyle=dash, marker="o", markersize=3, label=name)
