"""Make docs/reproduction.md from committed records.

``python -m experiments.paper.document``
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import click

from experiments.lab.figure import PaperFigure
from experiments.lab.finding import Finding, Range, Verdict
from experiments.lab.record import PICTURE, Record, committed
from experiments.output.files import write_text
from experiments.output.provenance import RESULTS
from experiments.paper import catalogue

DOCUMENT = RESULTS.parent.parent / "docs" / "reproduction.md"
_INTRODUCTION = """\
# Reproduction

What ZenFlow's paper and its independent users published, beside what this project finds. Made by
`python -m experiments.paper.document` from the records that `zenflow figures` wrote and
that are committed in `experiments/results`; a test compares them.

*Simulated* numbers are predicted, or computed by a closed form, for the published hardware unless
a note says otherwise. *Emulated* ones are of the real engine on a CPU over a link that really
waits but is not a real one. *Measured* ones are of the real engine with nothing emulated, or
counted. The verdict is computed: from the measured number if there is one, else the emulated, else
the simulated, and the tolerance. It is unknown where the published number or ours is."""


def document(results: Path = RESULTS) -> str:
    """Return the text of docs/reproduction.md for the records in a folder."""
    figures = [catalogue.load(name) for name in catalogue.names()]
    found = [(figure, committed(figure.name, results)) for figure in figures]
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


def _section(figure: PaperFigure, record: Record) -> list[str]:
    number = "" if figure.number is None else f"{figure.number}. "
    folder = f"../experiments/results/{record.folder.parent.name}/{record.name}"
    notes = list(dict.fromkeys(finding.note for finding in record.findings if finding.note))
    machine = f"{record.hardware['cpu']}, {record.hardware['cores']} cores"
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
    return [*lines, *_table(record.findings, notes), ""]


def _table(findings: Sequence[Finding], notes: Sequence[str]) -> list[str]:
    lines = [
        "| claim | source | published | tolerance | simulated | emulated | measured | verdict |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for finding in findings:
        mark = f" [{notes.index(finding.note) + 1}]" if finding.note else ""
        verdict = finding.verdict.value
        cells = [
            finding.claim + mark,
            finding.source,
            _published(finding),
            str(finding.tolerance),
            *(_number(v, finding.unit) for v in _ours(finding)),
            verdict if finding.verdict is Verdict.HOLDS else f"**{verdict}**",
        ]
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return lines + [line for n, note in enumerate(notes, 1) for line in ("", f"[{n}] {note}")]


def _ours(finding: Finding) -> tuple[float | None, float | None, float | None]:
    return finding.simulated, finding.emulated, finding.measured


def _published(finding: Finding) -> str:
    if isinstance(finding.published, Range):
        low = _number(finding.published.low, "")
        return f"{low} to {_number(finding.published.high, finding.unit)}"
    return _number(finding.published, finding.unit)


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    shown = f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{shown} {unit}".rstrip()


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=DOCUMENT, help="The file.")
def main(out: Path) -> None:
    """Write docs/reproduction.md from the committed records."""
    write_text(out, document())
    click.echo(f"wrote {out}")


if __name__ == "__main__":
    main()
