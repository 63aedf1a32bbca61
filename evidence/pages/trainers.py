"""The table of docs/guides/trainers.md: what the tests of zenflow/integrations compared.

``python -m evidence.pages.trainers`` writes it from the newest record. With ``--run`` it runs
the tests first, and makes a record of today.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import click

from evidence.pages.headlines import ROOT
from evidence.pages.results import with_part
from experiments.lab.columns import Table, key, markdown
from experiments.output.files import write_json, write_text
from experiments.output.provenance import newest_record, provenance, results_folder

DOCUMENT = ROOT / "docs" / "guides" / "trainers.md"
RECORD = "trainers.json"
_TESTS = "tests/zenflow/integrations"


def document(text: str) -> str:
    """Return the page with the table as the newest record has it."""
    folder = newest_record("trainers", RECORD)
    record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    columns = [key("trainer"), key("mode"), key("compared", head="equal to the plain loop"),
               key("versions")]  # fmt: skip
    link = f"../../evidence/results/{folder.name}/{RECORD}"
    said = (
        f"torch {record['versions']['torch']}, on a CPU; "
        f"`python -m evidence.pages.trainers --run` made the [record]({link})."
    )
    table = markdown(Table(columns=columns, rows=_rows(record["compared"])))
    return with_part(text, "compared", "\n".join([*table, "", said]))


def _rows(cases: Iterable[Mapping[str, str]]) -> list[dict[str, str]]:
    """Return a row for each trainer and mode, with all that was compared of it."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for case in cases:
        row = rows.setdefault((case["trainer"], case["mode"]), dict(case))
        if case["compared"] not in row["compared"]:
            row["compared"] += f", {case['compared']}"
    return [rows[place] for place in sorted(rows, key=lambda place: (place[0].lower(), place[1]))]


def compared(report: str) -> list[dict[str, str]]:
    """Return what tests that passed noted in pytest's report: trainer, mode, what was compared.

    Args:
        report: The report, JUnit's XML.
    """
    cases = []
    for case in ElementTree.fromstring(report).iter("testcase"):
        noted = {item.get("name", ""): item.get("value", "") for item in case.iter("property")}
        if "compared" in noted and not any(
            case.findall(s) for s in ("failure", "error", "skipped")
        ):
            packages = noted.pop("packages").split()
            noted["versions"] = ", ".join(f"{name} {version(name)}" for name in packages)
            cases.append(noted)
    return cases


def _run() -> dict[str, Any]:
    """Run the tests, and return their record.

    Raises:
        click.ClickException: A test failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", _TESTS, f"--junitxml={report}"],
            cwd=ROOT,
            check=False,
        )
        if done.returncode:
            raise click.ClickException(f"tests of {_TESTS} failed: no record is made")
        return {**provenance(), "compared": compared(report.read_text(encoding="utf-8"))}


@click.command()
@click.option("--run", is_flag=True, help="Run the tests and make a record of today first.")
def main(run: bool) -> None:
    """Write the table of docs/guides/trainers.md."""
    if run:
        folder = results_folder("trainers")
        folder.mkdir(exist_ok=True)
        write_json(folder / RECORD, _run())
        click.echo(f"wrote {folder / RECORD}")
    write_text(DOCUMENT, document(DOCUMENT.read_text(encoding="utf-8")))
    click.echo(f"wrote the table of {DOCUMENT}")


if __name__ == "__main__":
    main()
