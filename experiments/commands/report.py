"""``zenflow report``: one page of runs, traces and sweeps. Its help loads nothing heavy."""

from __future__ import annotations

import shlex
import time
from pathlib import Path

import click

from experiments.commands.answer import Answer
from experiments.commands.command import OUTPUT, Command, option
from experiments.commands.flag_types import PATH, OutputFile

_PAGES = (".html", ".htm")
_LARGE = 5_000_000
"""Bytes above which the command says what makes the page large."""


@click.command(
    cls=Command,
    name="report",
    examples=[
        "zenflow report runs.html runs/compared predicted.json",
    ],
)
@click.argument("out", type=OutputFile(*_PAGES), metavar="OUT.html")
@click.argument("inputs", type=PATH, nargs=-1, required=True, metavar="RUN|TRACE|SWEEP...")
@option("--title", default="zenflow report", show_default=True, section=OUTPUT,
        help="Words above the page.")  # fmt: skip
def report_command(out: Path, inputs: tuple[Path, ...], title: str) -> Answer:
    """Write one page that shows runs, traces and sweeps, and opens offline.

    RUN is a directory of `zenflow train` (a run, or a comparison), TRACE a .json or .json.gz that
    the engine, the simulator or torch.profiler wrote, SWEEP a directory of `zenflow sweep` or
    `zenflow tune`, or a .csv. The page has lanes that zoom, a comparison, tuning decisions, tables
    with heat maps, and where all was made. A page that is there already is replaced.
    """
    from experiments.output.files import write_text
    from experiments.report.loading import load
    from experiments.report.page import render
    from zenflow.provenance import provenance

    contents = load(inputs)
    words = ["zenflow", "report", str(out), *map(str, inputs)]
    made = {"at": time.strftime("%Y-%m-%d %H:%M"), "command": shlex.join(words), **provenance()}
    page = render(contents, title=title, made=made)
    write_text(out, page)
    size = len(page.encode())
    for note in contents.notes:
        click.echo(f"Note: {note}", err=True)
    if size > _LARGE:
        click.echo("Note: the page is large: give it fewer inputs at once", err=True)
    return Answer(
        record={"page": str(out), "bytes": size, "notes": contents.notes},
        show=lambda: click.echo(f"Page: {out} ({size / 1e6:.2f} MB)"),
    )
