"""Make docs/reproduction.md from committed records.

``python -m evidence.pages.reproduction``
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import click

from experiments.lab import catalogue
from experiments.lab.finding import Verdict
from experiments.lab.page import PICTURE, findings_table
from experiments.lab.record import Record, committed
from experiments.lab.study import Study
from experiments.output.files import write_text
from experiments.output.provenance import RESULTS

DOCUMENT = RESULTS.parent.parent / "docs" / "reproduction.md"
_INTRODUCTION = """\
# Reproduction

What ZenFlow's paper and its independent users published, beside what this project finds. Made by
`python -m evidence.pages.reproduction` from the records that `zenflow figures` wrote and
that are committed in `evidence/results`; a test compares them.

*Simulated* numbers are predicted, or computed by a closed form, for the published hardware unless
a note says otherwise. *Emulated* ones are of the real engine on a CPU over a link that really
waits but is not a real one. *Measured* ones are of the real engine with nothing emulated, or
counted. The verdict is computed: from the measured number if there is one, else the emulated, else
the simulated, and the tolerance. It is unknown where the published number or ours is."""


def document(results: Path = RESULTS) -> str:
    """Return the text of docs/reproduction.md for the records in a folder."""
    figures = [catalogue.load(name) for name in catalogue.names(catalogue.PAPER)]
    found = [(figure, committed(figure.key, results)) for figure in figures]
    records = [(figure, record) for figure, record in found if record is not None]
    findings = [finding for _, record in records for finding in record.findings]
    counts = Counter(finding.verdict for finding in findings)
    parts = [_INTRODUCTION, ""]
    if findings:
        parts += [", ".join(f"{counts[v]} {v.plural}" for v in Verdict) + ".", ""]
    parts += [line for figure, record in records for line in _section(figure, record)]
    missing = [figure.name for figure, record in found if record is None]
    if missing:
        parts += [f"No record yet: {', '.join(missing)}.", ""]
    return "\n".join(parts[:-1]) + "\n"


def _section(figure: Study, record: Record) -> list[str]:
    number = "" if figure.number is None else f"{figure.number}. "
    folder = f"../evidence/results/{record.folder.parent.name}/{record.folder.name}"
    hardware = record.header["hardware"]
    machine = f"{hardware['cpu']}, {hardware['cores']} cores"
    origin = f"seed {record.config['seed']}, commit {record.commit}, {machine}"
    if figure.exact:
        origin = f"nothing measured, commit {record.commit}"
    lines = [
        f"## {number}{figure.title}",
        "",
        f"![{figure.title}]({folder}/{PICTURE})",
        "",
        f"`zenflow figures {figure.name}`: {origin} ([record]({folder}/record.json)).",
        "",
    ]
    if record.config["smoke"]:
        lines += ["**A smoke run: its numbers say nothing.**", ""]
    if not record.findings:
        return [*lines, "No claim is published about it.", ""]
    return [*lines, *findings_table(record.findings), ""]


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=DOCUMENT, help="The file.")
def main(out: Path) -> None:
    """Write docs/reproduction.md from the committed records."""
    write_text(out, document())
    click.echo(f"wrote {out}")


if __name__ == "__main__":
    main()
