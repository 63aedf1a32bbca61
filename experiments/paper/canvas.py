"""An empty picture, as all figures of the paper begin. Loads matplotlib when it is called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def canvas(
    size: tuple[float, float],
    title: str,
    rows: int = 1,
    columns: int = 1,
    *,
    title_size: float = 11,
    **grid: Any,
) -> tuple[Figure, Any]:
    """Return a figure and its panels, without the upper and right line of their frames.

    Args:
        size: Width and height, inches.
        title: Headline.
        rows: Of panels.
        columns: Of panels.
        title_size: Size of the headline, points.
        grid: Other options of `Figure.subplots`, which says how the panels are arranged.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title, fontsize=title_size)
    panels = figure.subplots(rows, columns, **grid)
    for axes in np.ravel(panels):
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels
