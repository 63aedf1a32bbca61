"""The concepts' picture: k, S and lag on one matrix.

``python -m evidence.pages.window_picture`` draws it from the engine's own calendar.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from experiments.output.plots import SPAN_COLOURS, save_figure
from experiments.output.provenance import RESULTS
from zenflow.config import ZenFlowConfig
from zenflow.rule.blocks import BlockShape
from zenflow.rule.calendar import WindowCalendar

PICTURE = RESULTS.parent.parent / "docs" / "pictures" / "windows.svg"
CONFIG = ZenFlowConfig(topk_ratio=0.25, update_interval=4)
NUM_BLOCKS, NUM_STEPS = 4, 12
COLUMNS_PER_BLOCK = 8
_IMPORTANT, _DEFERRED, _LANDED = SPAN_COLOURS["backward"], SPAN_COLOURS["accumulate"], "#2e7d32"
_ENDS = SPAN_COLOURS["adam"]
_CHOSEN = ((1, 5), (0, 6), (2, 3), (4, 7))
"""Important columns of each block, for the picture's sake."""


@dataclass(frozen=True, slots=True)
class Window:
    """One window of one block, in steps."""

    block: int
    """Place of the block, from 0."""
    opened: int
    """Step after which the window begins."""
    due: int
    """Step whose end is the window's."""
    lands: int
    """Step at whose end the device has the update."""


def windows(config: ZenFlowConfig = CONFIG, num_steps: int = NUM_STEPS) -> Iterator[Window]:
    """Yield the windows that end within some steps, as the engine's calendar lays them out."""
    blocks = [
        BlockShape(
            matrix=0,
            first=COLUMNS_PER_BLOCK * block,
            num_columns=COLUMNS_PER_BLOCK,
            num_rows=COLUMNS_PER_BLOCK,
            bucket=block,
            cohort=block,
            num_important=len(chosen),
        )
        for block, chosen in enumerate(_CHOSEN)
    ]
    calendar = WindowCalendar(config, blocks)
    for step in range(1, num_steps + 1):
        for block in range(NUM_BLOCKS):
            if calendar.is_due(block, step):
                yield Window(block, calendar.opened[block], step, step + calendar.lag(step))
                calendar.close(block, step)


def draw() -> Figure:
    """Return the matrix with its columns on the left, and the steps of each block on the right."""
    figure = Figure(figsize=(11.5, 4.3), layout="constrained")
    matrix, steps = figure.subplots(1, 2, width_ratios=(1, 2.6))
    _draw_matrix(matrix)
    _draw_steps(steps)
    marks = [
        Patch(color=_IMPORTANT, label="important: the device updates it in every step"),
        Patch(color=_DEFERRED, label="deferred: the host takes an exact step for every gradient"),
        Line2D([], [], color=_ENDS, marker="s", ls="", label="window ends: weights leave"),
        Line2D([], [], color=_LANDED, marker="v", ls="", label="lands: the next forward uses it"),
    ]
    figure.legend(handles=marks, loc="outside lower center", ncols=2, frameon=False, fontsize=10)
    return figure


def _draw_matrix(axes: Axes) -> None:
    for block, chosen in enumerate(_CHOSEN):
        for column in range(COLUMNS_PER_BLOCK):
            colour = _IMPORTANT if column in chosen else _DEFERRED
            left = block * (COLUMNS_PER_BLOCK + 1.2) + column
            axes.add_patch(Rectangle((left, 0), 0.86, 8, color=colour, lw=0))
        middle = block * (COLUMNS_PER_BLOCK + 1.2) + COLUMNS_PER_BLOCK / 2
        axes.text(middle, -0.4, f"block {block + 1}", ha="center", va="top", fontsize=9)
    width = NUM_BLOCKS * (COLUMNS_PER_BLOCK + 1.2)
    axes.set(xlim=(-0.5, width), ylim=(-1.6, 10.2))
    axes.set_title(
        f"k = {CONFIG.topk_ratio:g}: share of columns\nthat the device owns", fontsize=11
    )
    axes.axis("off")


def _draw_steps(axes: Axes) -> None:
    found = list(windows(num_steps=NUM_STEPS + CONFIG.update_interval))
    axes.add_patch(Rectangle((0, NUM_BLOCKS + 0.15), NUM_STEPS, 0.55, color=_IMPORTANT, lw=0))
    for step in range(NUM_STEPS):
        axes.axvline(step, color="0.85", lw=0.8, zorder=0)
    for window in found:
        bottom = NUM_BLOCKS - 1 - window.block + 0.2
        width = window.due - window.opened
        body = Rectangle((window.opened + 0.04, bottom), width - 0.08, 0.55, color=_DEFERRED, lw=0)
        axes.add_patch(body)
        axes.plot(window.due - 0.06, bottom + 0.275, "s", color=_ENDS, ms=7)
        under_way = (window.due, window.lands - 0.1)
        axes.plot(under_way, (bottom + 0.275,) * 2, color=_LANDED, lw=1.4, ls=":")
        axes.plot(window.lands - 0.06, bottom + 0.275, "v", color=_LANDED, ms=8)
    _measure(axes, next(w for w in found if w.block == NUM_BLOCKS - 1 and w.opened > 0))
    names = ["important", *(f"block {block + 1}" for block in range(NUM_BLOCKS))]
    axes.set_yticks([NUM_BLOCKS + 0.42, *(NUM_BLOCKS - 1 - b + 0.47 for b in range(NUM_BLOCKS))])
    axes.set_yticklabels(names)
    axes.set_xticks([step + 0.5 for step in range(NUM_STEPS)])
    axes.set_xticklabels([str(step + 1) for step in range(NUM_STEPS)])
    axes.tick_params(length=0)
    axes.set(xlim=(0, NUM_STEPS + 0.1), ylim=(-0.75, NUM_BLOCKS + 0.9), xlabel="step")
    axes.spines[:].set_visible(False)
    axes.set_title(
        f"S = {CONFIG.update_interval}: steps of a window, in turn; it lands a step later",
        fontsize=11,
    )


def _measure(axes: Axes, window: Window) -> None:
    """Draw S and lag below one window, as lengths."""
    for start, end, text in (
        (window.opened, window.due, f"S = {window.due - window.opened}"),
        (window.due, window.lands, f"lag = {window.lands - window.due}"),
    ):
        axes.annotate("", (start, -0.05), (end, -0.05), arrowprops={"arrowstyle": "<->", "lw": 1})
        axes.text((start + end) / 2, -0.15, text, ha="center", va="top", fontsize=10)


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=PICTURE, help="The file.")
def main(out: Path) -> None:
    """Draw k, S and lag on one matrix."""
    with matplotlib.rc_context({"svg.hashsalt": "windows", "svg.fonttype": "path"}):
        save_figure(draw(), out)
    click.echo(f"wrote {out}")


if __name__ == "__main__":
    main()
