"""The page of a record, in Markdown: where it comes from, findings, tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.lab.columns import Column, Table, markdown
from experiments.lab.finding import Finding, Range, Verdict
from experiments.lab.study import Data, Study

PICTURE = "picture.png"


def page(study: Study, data: Data, findings: Sequence[Finding], record: Mapping[str, Any]) -> str:
    """Return the text of a record's README.md.

    Args:
        study: The study.
        data: Summary of the rows.
        findings: Findings of the data.
        record: Contents of record.json.
    """
    machine = f"{record['hardware']['cpu']}, {record['hardware']['cores']} cores"
    parts = [
        f"# {study.title}",
        f"Made by `zenflow study {study.key}`, commit {record['commit']}, on {machine}.",
    ]
    if record["config"]["smoke"]:
        parts.append("**A smoke run: its numbers say nothing.**")
    about = study.about(data)
    parts += [*([about] if about else []), f"![{study.title}]({PICTURE})"]
    if findings:
        parts += ["## Findings", "\n".join(findings_table(findings))]
    parts += ["\n".join(markdown(table)) for table in study.tables(data)]
    return "\n\n".join(parts) + "\n"


def findings_table(findings: Sequence[Finding]) -> list[str]:
    """Return a line for each finding, and the notes below them."""
    notes = list(dict.fromkeys(finding.note for finding in findings if finding.note))
    rows = [{"finding": finding} for finding in findings]

    def column(head: str, show: Any) -> Column:
        return Column(head=head, show=lambda row: str(show(row["finding"])))

    def claim(finding: Finding) -> str:
        mark = f" [{notes.index(finding.note) + 1}]" if finding.note else ""
        return finding.claim + mark

    columns = [
        column("claim", claim),
        column("source", lambda f: f.source),
        column("published", _published),
        column("tolerance", lambda f: f.tolerance),
        column("simulated", lambda f: _number(f.simulated, f.unit)),
        column("emulated", lambda f: _number(f.emulated, f.unit)),
        column("measured", lambda f: _number(f.measured, f.unit)),
        column("verdict", _verdict),
    ]
    lines = markdown(Table(columns=columns, rows=rows))
    return lines + [line for n, note in enumerate(notes, 1) for line in ("", f"[{n}] {note}")]


def _verdict(finding: Finding) -> str:
    verdict = finding.verdict.value
    return verdict if finding.verdict is Verdict.HOLDS else f"**{verdict}**"


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
