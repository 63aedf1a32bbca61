"""Pictures of a sweep's table: lines over one axis, a heat map over two, bars.

Nothing here predicts; every picture says that its numbers are predictions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from numpy.typing import NDArray

from experiments.output.plots import STALL_COLOUR
from experiments.sweeps.axes.kinds import Axis
from experiments.sweeps.table import predicted_rows

if TYPE_CHECKING:
    import pandas as pd

_NO_PREDICTION = "#f0dede"
_MOST_PANELS = 6
_MOST_NUMBERS = 150
"""Cells of a heat map up to which each shows its number."""
_LARGER_IS_BETTER = ("tokens_per_second",)
_COLOURS = ("#1b9e77", "#d95f02", "#7570b3", "#e7298a", "#66a61e", "#b8860b")
PLAIN = FuncFormatter(lambda number, _: f"{number:,.6g}")
"""Format of numbers without an offset or a power that a reader would have to add."""
SPREAD = 20.0
"""Largest over smallest value from which on a scale of numbers is logarithmic."""
_LEAST_RANGE = 0.1
"""Least range of a heat map's colours, as a share of the largest value."""


def draw_sweep(frame: pd.DataFrame, axes: Sequence[Axis], value: str) -> Figure | None:
    """Return a picture of one column over the axes; None where nothing varies or is predicted.

    With three axes the shortest makes panels; of any others the best value is shown.
    """
    varied = [axis for axis in axes if len(axis.values) > 1]
    if not varied or not predicted_rows(frame)[value].notna().any():
        return None
    if len(varied) == 1:
        return _draw_line(frame, varied[0], value)
    panel = None
    if len(varied) > 2:
        shortest = min(varied, key=lambda axis: len(axis.values))
        panel = shortest if len(shortest.values) <= _MOST_PANELS else None
    first, second, *others = [axis for axis in varied if axis is not panel]
    note = f", best over {', '.join(axis.name for axis in others)}" if others else ""
    return draw_heat_maps(frame, first, second, value, panel=panel, note=note)


def _draw_line(frame: pd.DataFrame, x: Axis, value: str) -> Figure:
    """Return a column over one axis."""
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.subplots()
    best = _best(predicted_rows(frame), [x], value).reindex(list(x.values))
    places = [float(v) for v in x.values] if x.is_number else range(len(x.values))  # type: ignore[arg-type]
    axes.plot(places, best.to_numpy(), marker="o", markersize=4, color=_COLOURS[0])
    axes.set_xlabel(x.label)
    if not x.is_number:
        axes.set_xticks(places, _ticks(x), rotation=30, ha="right", fontsize=8)
    elif min(places) > 0 and max(places) / min(places) >= SPREAD / 2:
        axes.set_xscale("log")
        axes.set_xticks(places, _ticks(x), minor=False, fontsize=8)
        axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_ylabel(value)
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{value}, predicted", fontsize=11)
    return figure


def draw_heat_maps(
    frame: pd.DataFrame,
    first: Axis,
    second: Axis,
    value: str,
    *,
    panel: Axis | None = None,
    note: str = "",
    levels: Sequence[float] = (),
) -> Figure:
    """Return a column over two axes, with a map for each value of a third.

    Args:
        frame: The table.
        first: From bottom to top.
        second: From left to right.
        value: The column.
        panel: A third axis.
        note: For the title.
        levels: At which lines are drawn.
    """
    groups = _groups(frame, panel)
    maps = [_matrix(own, first, second, value) for _, own in groups]
    finite = np.concatenate([grid[np.isfinite(grid)] for grid in maps])
    columns = min(len(maps), 3)
    rows = -(-len(maps) // columns)
    figure = Figure(figsize=(5.4 * columns + 0.8, 4.2 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    image = None
    for axes, grid, (label, _) in zip(panels, maps, groups, strict=False):
        axes.set_facecolor(_NO_PREDICTION)
        image = axes.imshow(
            np.ma.masked_invalid(grid), origin="lower", aspect="auto", cmap="viridis",
            norm=_norm(finite),
        )  # fmt: skip
        _label_cells(axes, grid)
        _draw_levels(axes, grid, levels)
        axes.set_xticks(range(len(second.values)), _ticks(second), rotation=45, fontsize=8)
        axes.set_yticks(range(len(first.values)), _ticks(first), fontsize=8)
        axes.set_xlabel(second.label)
        axes.set_ylabel(first.label)
        if panel is not None:
            axes.set_title(f"{panel.name} = {label}", fontsize=10)
    for axes in panels[len(maps) :]:
        axes.set_axis_off()
    if image is not None and len(finite):
        bar = figure.colorbar(image, ax=list(panels[: len(maps)]), label=value, shrink=0.8)
        if not isinstance(image.norm, LogNorm):
            bar.formatter = PLAIN
    empty = any(not np.isfinite(grid).all() for grid in maps)
    figure.suptitle(
        f"{value}, predicted{note}" + ("; shaded: no prediction (see reason)" if empty else ""),
        fontsize=11,
    )
    return figure


def draw_bars(
    names: Sequence[str], bars: Mapping[str, Sequence[float | None]], *, title: str, unit: str
) -> Figure:
    """Return bars side by side for each name; a value that is None was not reached."""
    figure = Figure(figsize=(1.3 * len(names) + 2, 4), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(bars)
    for place, (kind, values) in enumerate(bars.items()):
        left = [at + (place - (len(bars) - 1) / 2) * width for at in range(len(names))]
        drawn = axes.bar(left, [v or 0.0 for v in values], width, label=kind,
                         color=_COLOURS[place % len(_COLOURS)])  # fmt: skip
        labels = ["not\nreached" if v is None else f"{v:.0f}" for v in values]
        axes.bar_label(drawn, labels, fontsize=8)
    axes.set_xticks(range(len(names)), names, rotation=20, fontsize=9)
    axes.set_ylabel(unit, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    figure.suptitle(f"{title}, predicted", fontsize=11)
    return figure


def best_is_largest(value: str) -> bool:
    """Whether more of a column is better."""
    return value in _LARGER_IS_BETTER


# ---- parts ------------------------------------------------------------------------------------


def _groups(frame: pd.DataFrame, by: Axis | None) -> list[tuple[Any, pd.DataFrame]]:
    if by is None:
        return [("", frame)]
    return [(key, frame[frame[by.name] == key]) for key in _keys(by)]


def _keys(axis: Axis) -> list[Any]:
    """Return an axis's values as the table has them."""
    return list(axis.values) if axis.is_number else [str(value) for value in axis.values]


def _best(frame: pd.DataFrame, axes: Sequence[Axis], value: str) -> Any:
    grouped = frame.groupby([axis.name for axis in axes])[value]
    return grouped.max() if best_is_largest(value) else grouped.min()


def _matrix(frame: pd.DataFrame, first: Axis, second: Axis, value: str) -> NDArray[np.float64]:
    best = _best(predicted_rows(frame), [first, second], value).unstack(second.name)
    best = best.reindex(index=_keys(first), columns=_keys(second))
    return np.asarray(best, dtype=np.float64)


def _norm(finite: NDArray[np.float64]) -> Any:
    if not len(finite):
        return Normalize(0, 1)
    low, high = float(finite.min()), float(finite.max())
    if low > 0 and high / low >= SPREAD:
        return LogNorm(low, high)
    # Values that hardly differ get colours that hardly differ.
    missing = _LEAST_RANGE * (max(abs(low), abs(high)) or 1.0) - (high - low)
    room = max(0.0, missing) / 2
    return Normalize(low - room, high + room)


def _label_cells(axes: Axes, grid: NDArray[np.float64]) -> None:
    if grid.size > _MOST_NUMBERS:
        return
    largest = np.nanmax(np.abs(grid), initial=0.0)
    # Three digits of the largest: more of a small one would not fit its cell.
    digits = 2 - math.floor(math.log10(largest)) if largest > 0 else 0
    for (row, column), number in np.ndenumerate(grid):
        text = f"{round(float(number), digits):g}" if math.isfinite(number) else "-"
        axes.text(column, row, text, ha="center", va="center", fontsize=7, color="white",
                  bbox={"boxstyle": "round,pad=0.1", "fc": "#00000055", "ec": "none"})  # fmt: skip


def _draw_levels(axes: Axes, grid: NDArray[np.float64], levels: Sequence[float]) -> None:
    finite = grid[np.isfinite(grid)]
    crossed = [level for level in levels if len(finite) and finite.min() < level < finite.max()]
    if crossed and min(grid.shape) > 1:
        axes.contour(
            np.ma.masked_invalid(grid), levels=sorted(crossed), colors=STALL_COLOUR, linewidths=2
        )


def _ticks(axis: Axis) -> list[str]:
    return [f"{v:.4g}" if isinstance(v, float) else str(v) for v in axis.values]
