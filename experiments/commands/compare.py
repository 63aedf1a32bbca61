"""Commands on traces. Their help loads neither torch nor matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from experiments.commands.answer import Answer
from experiments.commands.command import OUTPUT, Command, option
from experiments.commands.flag_types import PATH, PICTURE
from experiments.traces.compare import Row, Side, align, compare_sides, load, to_json, warnings

if TYPE_CHECKING:
    from rich.table import Table

_SHOWN_UNITS = {
    "s": ("ms", 1e3),
    "1": ("%", 1e2),
    "B": ("MB", 1e-6),
    "B/s": ("GB/s", 1e-9),
}
"""Name and factor with which a table shows a unit."""
_FILE_WIDTH = 120
_LABELS = {
    "step": "step",
    "stall": "stalled: {name}",
    "busy": "{lane} busy",
    "share": "{lane} busy, of the step",
    "bytes": "{lane} bytes",
    "rate": "{lane} rate while busy",
    "span": "{lane}: {name}",
}


def _step_range(
    context: click.Context, param: click.Parameter, value: str | None
) -> tuple[int, int] | None:
    """Return the two numbers of FIRST:LAST."""
    if value is None:
        return None
    first, _, last = value.partition(":")
    try:
        steps = int(first), int(last)
    except ValueError as error:
        raise click.BadParameter(f"must be FIRST:LAST, got {value!r}: write 5:12, say") from error
    if steps[0] > steps[1]:
        raise click.BadParameter(f"FIRST must be at most LAST, got {value}: swap them")
    return steps


@click.command(
    cls=Command,
    examples=[
        "zenflow compare runs/measured predicted.json --plot both.png",
    ],
)
@click.argument("a", type=PATH)
@click.argument("b", type=PATH)
@option(
    "--steps", metavar="FIRST:LAST", callback=_step_range, section="Comparison",
    help="Compare these steps, the last included; default: all whole ones.",
)  # fmt: skip
@option("--plot", type=PICTURE, section=OUTPUT, help="Draw both into this picture.")
def compare(a: Path, b: Path, plot: Path | None, steps: tuple[int, int] | None) -> Answer:
    """Compare two traces: what each lane did per step, and how much of it was waiting.

    A and B are traces (.json, .json.gz) or directories of runs, each measured or simulated. The
    steps that both have are compared; where they share none, the means over all of each. Where
    updates land once in several steps, let --steps span whole such windows.
    """
    left, right = align(load(a), load(b), steps)
    rows = compare_sides(left, right)
    if plot is not None:
        _draw(left, right, plot)
        click.echo(f"Picture: {plot}")
    return Answer(record=to_json(left, right, rows), show=lambda: _print(left, right, rows))


def _print(a: Side, b: Side, rows: Sequence[Row]) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:  # a file or a pipe has no width to fit
        console.width = _FILE_WIDTH
    for mark, side in (("A", a), ("B", b)):
        text = f"{mark}: {side.trace.path} ({side.trace.label}), means over {side.averaged}"
        console.print(text, soft_wrap=True)
        if of := str(side.trace.facts):
            console.print(f"   {of}", soft_wrap=True)
    for text in warnings(a.trace, b.trace):
        console.print(f"Warning: {text}.", soft_wrap=True)
    if not a.starts.keys() & b.starts.keys():
        console.print("The traces share no step numbers, so all whole steps of each count.")
    console.print(figures_table(rows))


def figures_table(rows: Sequence[Row]) -> Table:
    """Return both traces' figures per step side by side; a notebook shows it too."""
    from rich.table import Table

    table = Table()
    table.add_column("per step", no_wrap=True)
    for name in ("", "A", "B", "B - A", "B / A"):
        table.add_column(name, justify="right", no_wrap=True)
    for row, after in zip(rows, [*rows[1:], None], strict=True):
        unit, factor = _SHOWN_UNITS[row.unit]
        table.add_row(
            _LABELS[row.group].format(lane=row.lane, name=row.name or "all"),
            unit,
            _number(row.a, factor),
            _number(row.b, factor),
            _number(row.difference, factor, "+"),
            "-" if row.ratio is None else f"{row.ratio:.3f}",
            end_section=after is not None and after.group != row.group,
        )
    return table


def _number(value: float | None, factor: float, sign: str = "") -> str:
    if value is None:
        return "-"
    shown = value * factor
    return f"{shown:{sign}.4g}" if abs(shown) < 9999.5 else f"{shown:{sign}.0f}"


def _draw(a: Side, b: Side, path: Path) -> None:
    from experiments.output.plots import save_figure
    from experiments.traces.picture import draw_overlay

    save_figure(draw_overlay(a, b), path)
