"""The frame that the studies' pictures share."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure


def panels(
    width: float, height: float, count: int = 1, *, title: str = "", sharey: bool = False
) -> tuple[Figure, list[Axes]]:
    """Return a new figure and its panels side by side, open at the top and at the right.

    Args:
        width: Inches of the whole figure.
        height: Inches.
        count: Number of panels.
        title: Headline above all panels.
        sharey: Whether the panels have one scale of heights.
    """
    figure = Figure(figsize=(width, height), layout="constrained")
    found: list[Axes] = list(figure.subplots(1, count, squeeze=False, sharey=sharey)[0])
    for axes in found:
        axes.spines[["top", "right"]].set_visible(False)
    if title:
        figure.suptitle(title, fontsize=12)
    return figure, found
