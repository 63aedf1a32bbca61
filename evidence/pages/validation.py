"""docs/validation.md and the pages of its rows, made from committed records.

``python -m evidence.pages.validation`` writes them.

A record keeps what was measured. When the simulator changes, so do the predictions: this makes
the records' own again as well. One of the former update rule keeps its own.
"""

from __future__ import annotations

from pathlib import Path

import click

from evidence.studies.published.section import pages, section
from experiments.lab.columns import Table, markdown
from experiments.lab.page import FORMER
from experiments.lab.record import Record, committed, put
from experiments.output.files import write_text
from experiments.output.provenance import RESULTS
from experiments.validation.study import RANK_COLUMNS, RUN_COLUMNS, STUDY, newest

DOCUMENT = RESULTS.parent.parent / "docs" / "validation.md"
_NO_GPU = """\
No record yet: [limits](limits.md#what-has-been-tried-on-a-gpu) tells what the first calibration \
missed. Figures for GPUs are the table's, and the first section is all there is to check them \
with."""

_RANKS = """\
Each rank has its share of the cores, a link of its own and its share of every batch. Predictions \
take the profile of one process. Other runs of as many ranks gave what differs: what collectives \
take by call and by byte, what cores do that all ranks keep busy, and what hand-overs among \
threads take. What ranks wait for one another is not told apart from work, so that no stall is \
compared."""


def document(results: Path = RESULTS) -> str:
    """Return the text of docs/validation.md for the records in a folder."""
    parts = [
        "# Validation",
        "",
        "What the simulator predicts beside what was measured. Made by `python -m "
        "evidence.pages.validation` from the records in `evidence/results`; a "
        "test compares them.",
        "",
        "## Published measurements",
        "",
        *section(committed("published", results)),
        "",
        "## This project's engine on a CPU with an emulated link",
        "",
        _runs(
            newest(results, is_cpu=True),
            "Runs that calibrated nothing, with the profile that other runs gave. They took turns "
            "with these, so that the machine was as fast for both. ",
            "No record yet.",
        ),
        "",
        "## On a GPU",
        "",
        _runs(newest(results, is_cpu=False), "", _NO_GPU),
    ]
    return "\n".join(parts) + "\n"


def documents(index: Path, results: Path = RESULTS) -> dict[Path, str]:
    """Return the text of docs/validation.md and of the pages that it links to, by path."""
    folder = index.parent / "validation"
    beside = pages(committed("published", results))
    made = {folder / f"{name}.md": "\n".join(lines) + "\n" for name, lines in beside.items()}
    return {index: document(results), **made}


def write(index: Path, results: Path = RESULTS) -> None:
    """Write docs/validation.md and the pages that it links to."""
    for path, text in documents(index, results).items():
        path.parent.mkdir(exist_ok=True)
        write_text(path, text)


def _runs(found: Record | None, before: str, without: str) -> str:
    """Return a table of a validation's runs, their errors below; without one another text."""
    if found is None:
        return without
    data, name = found.data(STUDY), found.folder.name
    lines = [f"{before}Record: [{name}](../evidence/results/{name}).", ""]
    if not found.is_of(STUDY):
        lines += [FORMER, ""]
    lines += markdown(Table(columns=RUN_COLUMNS, rows=data["runs"]))
    lines += ["", data["said"]]
    if ranks := data["ranks"]:
        lines += ["", f"### {ranks['count']} ranks of that machine over {ranks['backend']}", ""]
        lines += [_RANKS, "", *markdown(Table(columns=RANK_COLUMNS, rows=ranks["runs"]))]
        lines += ["", ranks["said"]]
    return "\n".join(lines)


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=DOCUMENT, help="The file.")
def main(out: Path) -> None:
    """Write docs/validation.md, and predictions of the committed records, as they are today."""
    write(out)
    click.echo(f"wrote {out}")
    for found in (newest(is_cpu=True), newest(is_cpu=False)):
        if found is not None and found.is_of(STUDY):
            put(found.folder, STUDY, found.header, found.rows)
            click.echo(f"wrote predictions of {found.folder}")


if __name__ == "__main__":
    main()
