"""Pareto fronts of a sweep's table: what nothing beats in both of two columns, and its picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.output.plots import STRATEGY_COLOURS
from experiments.sweeps.axes.kinds import Axis
from experiments.sweeps.pictures.plots import PLAIN, SPREAD, best_is_largest
from experiments.sweeps.prices import COLUMN
from experiments.sweeps.table import predicted_rows

if TYPE_CHECKING:
    import pandas as pd

_FRONT, _POINTS = STRATEGY_COLOURS["zenflow"], "#bbbbbb"
_IN_GIB = ("device_bytes", "host_bytes")
_SHOWN_AS = {
    "device_bytes": "device memory (GiB)",
    "host_bytes": "host memory (GiB)",
    COLUMN: "price of the parts (USD)",
}
_MOST_NAMED = 24
"""Points whose names are listed."""


def draw_pareto(
    frame: pd.DataFrame, axes: Sequence[Axis], value: str, against: Sequence[str]
) -> Figure | None:
    """Return a column against others, with the points that nothing beats in both.

    All points carry names where they are few, else those that nothing beats.
    """
    known = predicted_rows(frame)
    known = known[known[value].notna()] if value in known else known[:0]
    shown = [
        name for name in against if name != value and name in known and known[name].nunique() > 1
    ]
    if not shown or len(known) < 2:
        return None
    figure = Figure(figsize=(5.2 * len(shown), 4.6), layout="constrained")
    fronts = {name: front(known[known[name].notna()], name, value) for name in shown}
    best = known.index.isin(set().union(*(own.index for own in fronts.values())))
    named = known if len(known) <= _MOST_NAMED else known[best]
    numbers = {index: number for number, index in enumerate(named.index, start=1)}
    for panel, name in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        _draw_front(panel, known[known[name].notna()], fronts[name], name, value, numbers)
    figure.axes[0].legend(fontsize=8, frameon=False)
    names = _point_names(named, [axis for axis in axes if len(axis.values) > 1])
    key = [f"{number}  {text}" for number, text in enumerate(names, start=1)][:_MOST_NAMED]
    if len(names) > _MOST_NAMED:
        key.append(f"and {len(names) - _MOST_NAMED} more, in the table")
    figure.legend(
        handles=[Line2D([], [], linestyle="none", label=text) for text in key],
        loc="outside lower center", ncols=min(len(shown), len(key)), fontsize=7, frameon=False,
        handlelength=0,
    )  # fmt: skip
    figure.suptitle(f"{value} against what it costs, predicted", fontsize=11)
    return figure


def _draw_front(
    panel: Axes, frame: pd.DataFrame, best: pd.DataFrame, name: str, value: str,
    numbers: Mapping[Any, int],
) -> None:  # fmt: skip
    """Draw one column against another, with the front and the points' numbers."""
    unit = 2**30 if name in _IN_GIB else 1
    panel.scatter(frame[name] / unit, frame[value], s=12, color=_POINTS, label="all points")
    panel.step(best[name] / unit, best[value], where="post", color=_FRONT, marker="o",
               markersize=4, label="Pareto front")  # fmt: skip
    for index, x, y in zip(frame.index, frame[name] / unit, frame[value], strict=True):
        if index in numbers:
            panel.annotate(str(numbers[index]), (x, y), (3, 3), textcoords="offset points",
                           fontsize=8)  # fmt: skip
    panel.set_xlabel(_SHOWN_AS.get(name, name))
    panel.set_ylabel(value)
    scales = ((panel.xaxis, panel.set_xscale, name), (panel.yaxis, panel.set_yscale, value))
    for axis, set_scale, column in scales:
        low, high = frame[column].min(), frame[column].max()
        if low > 0 and high / low >= SPREAD:
            set_scale("log")
        else:
            axis.set_major_formatter(PLAIN)
    panel.spines[["top", "right"]].set_visible(False)


def _point_names(frame: pd.DataFrame, axes: Sequence[Axis]) -> list[str]:
    """Return each row's values of what was varied: names alone, numbers with their axis."""
    return [
        ", ".join(
            f"{axis.name}={row[axis.name]:g}" if axis.is_number else str(row[axis.name])
            for axis in axes
        )
        for _, row in frame.iterrows()
    ]


def front(frame: pd.DataFrame, cost: str, value: str) -> pd.DataFrame:
    """Return the rows than which no other costs as little and has a better value."""
    sign = -1.0 if best_is_largest(value) else 1.0
    found = frame.assign(_value=sign * frame[value].astype(float))
    found = found.sort_values([cost, "_value"], kind="stable")
    least = found["_value"].cummin().shift(fill_value=math.inf)
    return found[found["_value"] < least].drop(columns="_value")
