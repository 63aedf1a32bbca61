"""Names that templates look numbers up with."""

from __future__ import annotations

import io
import json
import posixpath
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import jinja2
from rich.console import Console

from evidence.pages import gpu, published
from evidence.pages.formats import enumerated
from evidence.studies.accuracy import excesses
from evidence.studies.host_state import by_variant
from experiments.lab import catalogue, page
from experiments.lab.columns import Table, markdown
from experiments.lab.finding import BASES, Finding, Verdict
from experiments.lab.intervals import Comparison, compare
from experiments.lab.record import Record, committed, needed
from experiments.lab.study import Data, Study
from experiments.output.provenance import RESULTS, newest_record
from experiments.training.run import compared_runs
from experiments.validation.study import STUDY, newest

ROOT = RESULTS.parents[1]
_REFUSALS = "tests.zenflow.conformance.refusals"


@dataclass(frozen=True)
class Shown:
    """A study's record, as a template asks for its numbers."""

    study: Study
    record: Record

    @property
    def command(self) -> str:
        """Command that makes such a record."""
        if self.study.group == catalogue.PAPER:
            return f"zenflow figures {self.study.name}"
        return f"zenflow study {self.study.key}"

    @property
    def origin(self) -> str:
        """Commit and machine of the record."""
        return _origin(self.record.header)

    @property
    def path(self) -> str:
        """Folder of the record, from the repository's root."""
        return _path(self.record.folder)

    @property
    def picture(self) -> str:
        """Picture of the record, from the repository's root."""
        return f"{self.path}/{page.PICTURE}"

    @property
    def is_former(self) -> bool:
        """Whether the record is of an earlier revision of its study."""
        return not self.record.is_of(self.study)

    @property
    def config(self) -> Data:
        """Settings that all rows share."""
        return self.record.config

    @property
    def findings(self) -> Sequence[Finding]:
        """Findings of the record."""
        return self.record.findings

    @cached_property
    def data(self) -> Data:
        """Summary of the rows."""
        return self.record.data(self.study)

    def table(self, title: str) -> list[dict[str, str]]:
        """Return the rows of the table of this title: text by headline."""
        found = {table.title: table for table in self.study.tables(self.data)}
        if title not in found:
            raise LookupError(f"no table {title!r}; there are {list(found)}")
        return [dict(zip(found[title].heads, texts, strict=True)) for texts in found[title].texts]

    def ours(self, part: str) -> list[float]:
        """Return the numbers that decide the findings whose claims contain a text."""
        found = [finding.ours for finding in self.findings if part in finding.claim]
        if not found or None in found:
            raise LookupError(f"findings of {self.study.key} have no number of {part!r}")
        return [number for number in found if number is not None]


@dataclass(frozen=True)
class Measured:
    """A benchmark's record: a file of numbers beside a file of text."""

    folder: Path
    name: str
    command: str = "make bench"
    picture: str = ""
    is_former: bool = False
    findings: Sequence[Finding] = ()

    @property
    def path(self) -> str:
        """File of text, from the repository's root."""
        return f"{_path(self.folder)}/{self.name}.txt"

    @cached_property
    def data(self) -> Data:
        """All numbers."""
        return _json(self.folder / f"{self.name}.json")

    @property
    def origin(self) -> str:
        """Commit and machine of the record."""
        return _origin(self.data)


def _origin(header: Mapping[str, Any]) -> str:
    hardware = header["hardware"]
    more = [
        f"{count} rows by commit {commit}" for commit, count in header.get("added", {}).items()
    ]
    added = f" (and {', '.join(more)})" if more else ""
    return f"commit {header['commit']}{added}, {hardware['cpu']}, {hardware['cores']} cores"


def _path(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _json(path: Path) -> Data:
    found: Data = json.loads(path.read_text(encoding="utf-8"))
    return found


@cache
def record(key: str) -> Shown:
    """Return the newest committed record of a study."""
    return Shown(catalogue.load(key), needed(key))


def recorded(name: str) -> bool:
    """Return whether a study has a committed record; whatever is no study counts as having one."""
    return name not in catalogue.names() or committed(name) is not None


@cache
def records(group: str) -> list[Shown]:
    """Return the newest committed record of each study of a group, where it has one."""
    found = [(catalogue.load(key), committed(key)) for key in catalogue.names(group)]
    return [Shown(study, record) for study, record in found if record is not None]


@cache
def validation(*, is_cpu: bool) -> Shown | None:
    """Return the newest validation of a kind of device, with today's predictions."""
    found = newest(is_cpu=is_cpu)
    return None if found is None else Shown(STUDY, found)


@cache
def benchmark(name: str, day: str = "") -> Measured:
    """Return the newest record of a benchmark, or that of a day."""
    if not day:
        return Measured(newest_record("benchmarks", f"{name}.txt"), name)
    found = [*RESULTS.glob(f"{day}_benchmarks_*/{name}.txt")]
    if len(found) != 1:
        raise LookupError(f"{len(found)} records of {name} are of {day}, not one")
    return Measured(found[0].parent, name)


def file(name: str, path: str) -> Data:
    """Return a file's contents in the newest record of a name; ``path`` is the file's address."""
    folder = newest_record(name, path)
    return {**_json(folder / path), "path": _path(folder / path)}


def compared(shown: Shown) -> dict[str, Comparison]:
    """Return the accuracies of SST-2's variants beside AdamW's."""
    found = compare(shown.record.rows, shown.config["num_test"])
    return {comparison.variant: comparison for comparison in found}


def first_run() -> str:
    """Return the last lines that `make run` printed, in the run whose record is committed."""
    runs = compared_runs.read_comparison(newest_record("compare", compared_runs.COMPARISON))
    said = io.StringIO()
    Console(file=said, width=130).print(compared_runs.table(runs))
    lines = (line.rstrip() for line in said.getvalue().splitlines())
    return "\n".join(lines) + "\n" + compared_runs.verdict(runs)


def refusals() -> Mapping[str, Sequence[Any]]:
    """Return the refusals that the tests of conformance hold, by occasion."""
    suite = import_module(_REFUSALS)
    return {**suite.REFUSALS, "In release mode only": suite.OF_RELEASE_MODE}


def verdicts(findings: Sequence[Finding]) -> dict[str, int]:
    """Return how many findings hold, do not hold, and can't be told; and how many there are."""
    counts = Counter(finding.verdict for finding in findings)
    return {
        "hold": counts[Verdict.HOLDS],
        "fail": counts[Verdict.FAILS],
        "unknown": counts[Verdict.UNKNOWN],
        "all": len(findings),
    }


def held(findings: Sequence[Finding]) -> str:
    """Return in words how many claims hold."""
    counts = verdicts(findings)
    if counts["hold"] == counts["all"]:
        return f"all {counts['all']} claims hold" if counts["all"] > 1 else "its one claim holds"
    fail = f"{counts['fail']} {'does' if counts['fail'] == 1 else 'do'} not"
    unknown = f"{counts['unknown']} can't be told"
    others = [text for text, name in ((fail, "fail"), (unknown, "unknown")) if counts[name]]
    return enumerated([f"{counts['hold']} of {counts['all']} claims hold", *others])


def claim(finding: Finding) -> str:
    """Return a claim with the numbers that decide it and the verdict, as one sentence."""
    found = [("published", page.published(finding))]
    found += [(name, page.number(getattr(finding, name), finding.unit)) for name in BASES]
    numbers = ", ".join(f"{name} {text}" for name, text in found if text)
    return f"{finding.claim}: {numbers}. *{finding.verdict.value.capitalize()}.*"


def table(shown: Table) -> str:
    """Return a table in Markdown."""
    return "\n".join(markdown(shown))


@jinja2.pass_context
def link(context: jinja2.runtime.Context, path: str) -> str:
    """Return the way to a path of the repository from the page that is made."""
    return posixpath.relpath(path, posixpath.dirname(context["page"]) or ".")


def given(condition: bool) -> str:
    """Return nothing where what a sentence says in words is so.

    Raises:
        LookupError: It is not.
    """
    if not condition:
        raise LookupError("the records no longer say what this sentence says: write it anew")
    return ""


GLOBALS = {
    "FORMER": page.FORMER,
    "benchmark": benchmark,
    "claim": claim,
    "compared": compared,
    "excesses": excesses,
    "file": file,
    "first_run": first_run,
    "given": given,
    "gpu": cache(gpu.newest_suite),
    "held": held,
    "host_states": by_variant,
    "link": link,
    "published": published.published,
    "record": record,
    "recorded": recorded,
    "records": records,
    "refusals": refusals,
    "table": table,
    "validation": validation,
    "verdicts": verdicts,
}
