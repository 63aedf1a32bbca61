"""Record of the trainers that the engine was tested in.

``python -m evidence.benchmarks.trainer_tests`` runs the tests of zenflow/integrations.

They use the trainers that are installed, and the record names these with their versions. The
guide of trainers prints the record as a table.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import click

from experiments.output.files import write_json
from experiments.output.provenance import RESULTS, results_folder
from zenflow.provenance import provenance

RECORD = "trainers.json"
_TESTS = "tests/zenflow/integrations"


def compared(report: str) -> list[dict[str, str]]:
    """Return the notes of passed tests in pytest's report: trainer, mode, compared values.

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
            cwd=RESULTS.parents[1],
            check=False,
        )
        if done.returncode:
            raise click.ClickException(f"tests of {_TESTS} failed: no record is made")
        return {**provenance(), "compared": compared(report.read_text(encoding="utf-8"))}


@click.command()
def main() -> None:
    """Run the tests of zenflow/integrations and make a record of today."""
    folder = results_folder("trainers")
    folder.mkdir(exist_ok=True)
    write_json(folder / RECORD, _run())
    click.echo(f"wrote {folder / RECORD}; now write the pages: python -m evidence.pages.build")


if __name__ == "__main__":
    main()
