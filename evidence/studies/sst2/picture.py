"""The study's picture: accuracies by seed, and differences to the device with their intervals."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.lab.drawing import panels
from experiments.lab.intervals import CONFIDENCE, FAILS, MARGIN, Comparison
from experiments.lab.variants import BASELINE
from experiments.output.plots import STRATEGY_COLOURS

_OTHER = "#bbbbbb"
_ROOM = 0.8
_PERCENT = 100


def draw_accuracy(comparisons: Sequence[Comparison], title: str) -> Figure:
    """Return the accuracies at the left and the differences at the right, a line per strategy."""
    height = 1.8 + 0.45 * len(comparisons)
    figure, (left, right) = panels(12, height, count=2, title=title, sharey=True)
    for place, comparison in enumerate(comparisons):
        colour = STRATEGY_COLOURS.get(comparison.variant.split(" ")[0], _OTHER)
        _draw_accuracies(left, place, comparison, colour)
        if comparison.variant != BASELINE:
            _draw_difference(right, place, comparison, colour)
    left.set_yticks(range(len(comparisons)), [c.variant for c in comparisons])
    left.set_ylim(len(comparisons) - 0.5, -0.5)
    left.set_xlabel("accuracy, % (dots: seeds; line: mean)")
    right.axvline(0, color=STRATEGY_COLOURS[BASELINE], linewidth=1)
    right.axvline(-_PERCENT * MARGIN, color="#d62728", linewidth=1, linestyle="--")
    right.set_xlabel(
        f"difference to {BASELINE}, points, with its {CONFIDENCE:.0%} interval\n"
        f"(dashed: a loss of {_PERCENT * MARGIN:g})"
    )
    for axes in (left, right):
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x", color="#eeeeee")
        axes.set_axisbelow(True)
    return figure


def _draw_accuracies(axes: Axes, place: int, comparison: Comparison, colour: str) -> None:
    shown = [_PERCENT * value for value in comparison.accuracies]
    axes.plot(shown, [place] * len(shown), "o", color=colour, markersize=5, alpha=0.6)
    mean = _PERCENT * comparison.mean
    axes.vlines(mean, place - _ROOM / 2, place + _ROOM / 2, colour, linewidth=2)


def _draw_difference(axes: Axes, place: int, comparison: Comparison, colour: str) -> None:
    """Draw the interval; of a single seed there is none, and the difference stands alone."""
    mean = _PERCENT * comparison.difference
    half = _PERCENT * comparison.half_width
    if half < float("inf"):
        axes.hlines(place, mean - half, mean + half, colour, linewidth=3)
    axes.plot(mean, place, "o", color=colour, markersize=7)
    bold = "bold" if comparison.verdict == FAILS else "normal"
    axes.annotate(
        comparison.verdict, (mean, place), xytext=(0, 7), textcoords="offset points",
        ha="center", fontsize=8, fontweight=bold,
    )  # fmt: skip
