"""Losses of the first steps laid over one another, and held-out losses beside AdamW's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evidence.studies.language_model.design import (
    ADAMW,
    COMPACT,
    DEFAULT,
    LONG,
    PUBLISHED,
    RULES,
)
from experiments.lab.study import Data

_STYLES: Mapping[str, tuple[str, str]] = {
    ADAMW: ("#444444", "-"),
    DEFAULT: ("#1b9e77", "-"),
    COMPACT: ("#7570b3", "--"),
    LONG: ("#d95f02", "-"),
    PUBLISHED: ("#e7298a", ":"),
}
"""Colour and dash of each rule whose curve is drawn."""
_OTHER, _PEER = "#999999", "#a6761d"


def draw(data: Data, rate: float, margin: float) -> Figure:
    """Return a row of panels for each task: curves of the first seed, and losses of all seeds.

    Args:
        data: Summary of the rows.
        rate: Learning rate of the runs that are drawn.
        margin: Percent of AdamW's held-out loss that count as none.
    """
    groups = [group for group in data["groups"] if group["lr"] == rate]
    tasks = list(dict.fromkeys(group["task"] for group in groups))
    figure = Figure(figsize=(12, 0.6 + 4 * max(1, len(tasks))), layout="constrained")
    panels = figure.subplots(max(1, len(tasks)), 2, squeeze=False)
    for row, task in enumerate(tasks):
        own = [group for group in groups if group["task"] == task]
        for axes in panels[row]:
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_title(task, fontsize=11)
        _draw_curves(panels[row][0], own)
        _draw_ends(panels[row][1], own, margin)
    return figure


def _draw_curves(axes: Axes, groups: Sequence[Mapping[str, Any]]) -> None:
    for group in groups:
        if group["rule"] in _STYLES:
            colour, dash = _STYLES[group["rule"]]
            steps = range(1, len(group["curve"]) + 1)
            axes.plot(steps, group["curve"], color=colour, linestyle=dash, label=group["rule"])
    axes.set_xlabel("step")
    axes.set_ylabel("training loss, first seed")
    axes.legend(fontsize=8, frameon=False)


def _draw_ends(axes: Axes, groups: Sequence[Mapping[str, Any]], margin: float) -> None:
    """Draw every rule beside AdamW, the least loss above; peers are marked by a star.

    Losses of a thousandth and of half are told apart: behind the margin the axis is logarithmic.
    """
    compared = [g for g in groups if g["percent"] and g["rule"] != g["beside"]]
    shown = sorted(compared, key=lambda group: fmean(group["percent"]))
    axes.axvspan(-margin, margin, color="#e8f0ec", linewidth=0)
    axes.axvline(0, color=_STYLES[ADAMW][0], linewidth=1)
    for line, group in enumerate(shown):
        is_peer = RULES[group["rule"]].is_peer
        colour, _ = _STYLES.get(group["rule"], (_PEER if is_peer else _OTHER, ""))
        axes.scatter(
            group["percent"], [line] * len(group["percent"]), color=colour, s=26 + 50 * is_peer,
            marker="*" if is_peer else "o",
        )  # fmt: skip
        axes.annotate(
            f"{round(fmean(group['percent']), 2) + 0.0:+.2f}%", (1, line),
            xycoords=("axes fraction", "data"), xytext=(4, 0), textcoords="offset points",
            va="center", fontsize=8,
        )  # fmt: skip
    axes.set_xscale("symlog", linthresh=margin)
    low, high = axes.get_xlim()
    ticks = [0, *(sign * value for value in (margin, 1, 3, 10, 30, 100) for sign in (-1, 1))]
    shown_ticks = sorted({tick for tick in ticks if low <= tick <= high})
    axes.set_xticks(shown_ticks, [f"{tick:g}" for tick in shown_ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(shown)), [group["rule"] for group in shown])
    axes.invert_yaxis()
    axes.set_xlabel(
        "held-out loss beside AdamW's, %\ndots: seeds; band: margin; stars: others' rules"
    )
