"""The page of a record, in Markdown: where it comes from, findings, tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.lab.columns import Column, Table, markdown
from experiments.lab.finding import Finding, Range, Verdict
from experiments.lab.study import Data, Study

PICTURE = "picture.png"
FORMER = "**Of an earlier update rule**: it is to be made anew."
"""Note on a record of such a revision."""


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
        f"Made by `zenflow study {study.key}`, commit {record['commit']}, on {machine}."
        + "".join(
            f" Commit {commit} added {count} rows, after it had made the first and the last row "
            "of the record again, with equal numbers."
            for commit, count in record.get("added", {}).items()
        ),
    ]
    if record["config"]["smoke"]:
        parts.append("**A smoke run: its numbers say nothing.**")
    if record["config"].get("revision", 1) < study.revision:
        parts.append(FORMER)
    about = study.about(data)
    parts += [*([about] if about else []), f"![{study.title}]({PICTURE})"]
    if study.page:
        held = sum(finding.verdict is Verdict.HOLDS for finding in findings)
        parts.append(
            f"{held} of {len(findings)} claims hold. [{study.page}](../../../{study.page}) prints "
            "them all with their sources, and `rows.jsonl` has every number."
        )
        return "\n\n".join(parts) + "\n"
    if findings:
        parts += ["## Findings", "\n".join(findings_table(findings))]
    parts += ["\n".join(markdown(table)) for table in study.tables(data)]
    return "\n\n".join(parts) + "\n"


def findings_table(findings: Sequence[Finding]) -> list[str]:
    """Return a line for each finding, and the notes below them.

    Columns without a number are left out. A source that all findings share is said once.
    """
    notes = list(dict.fromkeys(finding.note for finding in findings if finding.note))

    def claim(finding: Finding) -> str:
        mark = f" [{notes.index(finding.note) + 1}]" if finding.note else ""
        return finding.claim + mark

    columns = [
        Column(head="claim", show=claim),
        Column(head="source", show=lambda f: f.source),
        Column(head="published", show=published),
        Column(head="tolerance", show=lambda f: str(f.tolerance)),
        Column(head="simulated", show=lambda f: number(f.simulated, f.unit)),
        Column(head="emulated", show=lambda f: number(f.emulated, f.unit)),
        Column(head="measured", show=lambda f: number(f.measured, f.unit)),
        Column(head="verdict", show=_verdict),
    ]
    columns = [column for column in columns if any(map(column.show, findings))]
    above = []
    if len(findings) > 1 and len({finding.source for finding in findings}) == 1:
        above = [f"Source of all: {findings[0].source}.", ""]
        columns = [column for column in columns if column.head != "source"]
    lines = above + markdown(Table(columns=columns, rows=findings))
    return lines + [line for n, note in enumerate(notes, 1) for line in ("", f"[{n}] {note}")]


def _verdict(finding: Finding) -> str:
    verdict = finding.verdict.value
    return verdict if finding.verdict is Verdict.HOLDS else f"**{verdict}**"


def published(finding: Finding) -> str:
    """Return the published number or range with its unit; nothing of none."""
    if isinstance(finding.published, Range):
        low = number(finding.published.low, "")
        return f"{low} to {number(finding.published.high, finding.unit)}"
    return number(finding.published, finding.unit)


def number(value: float | None, unit: str) -> str:
    """Return a number of a finding with its unit; nothing of none."""
    if value is None:
        return ""
    shown = f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{shown} {unit}".rstrip()
