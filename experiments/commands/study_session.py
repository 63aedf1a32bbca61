"""Session: a call of ``zenflow study`` or ``zenflow figures``, study by study."""

from __future__ import annotations

import shutil
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from experiments.commands.answer import Answer, Exit
from experiments.lab import check
from experiments.lab import record as records
from experiments.lab.columns import rich
from experiments.lab.finding import Finding, Verdict
from experiments.lab.page import PICTURE
from experiments.lab.record import Record
from experiments.lab.runner import Runner
from experiments.lab.study import NeedsInputError, Scope, Study
from zenflow.errors import ConfigError, NoRoomError, ZenFlowError

_GRAVITY = (Exit.FAULT, Exit.REFUSED, Exit.NO_ROOM, Exit.NOT_SO, Exit.DONE)
"""Codes of several studies: the first of them that some study has is the command's."""


def facts(record: Record) -> dict[str, Any]:
    """Return a record as ``--json`` has it: its place and its findings with their verdicts."""
    return {
        "study": record.name,
        "record": str(record.folder),
        "seconds": record.header["seconds"],
        "findings": [finding.to_dict() for finding in record.findings],
    }


def code_of(findings: Iterable[Finding]) -> Exit:
    """Return the exit code that findings call for."""
    return Exit.NOT_SO if any(f.verdict is Verdict.FAILS for f in findings) else Exit.DONE


@dataclass(slots=True, kw_only=True)
class Session:
    """One call of a command."""

    out: Path
    """Folder of the records."""
    keep: Path
    """Folder of what interrupted studies keep."""
    scope: Scope
    """Scope that all studies of the call have."""
    force: bool
    """Whether what is done is made again."""
    workers: int
    """Number of cells at a time."""
    seconds: float | None
    """Time after which no other cell of a study is begun."""
    extend: bool
    """Whether records of another commit are added to."""
    named: bool
    """Whether the studies were asked for by name."""
    group: str | None
    """Group that is left out of names and folders."""
    console: Console
    """Console for all messages."""
    failed: dict[str, Exit] = field(default_factory=dict)
    """Codes of the studies that failed or differ, by name."""
    told: list[dict[str, Any]] = field(default_factory=list)
    """Facts on each study, as ``--json`` has them."""

    def list(self, studies: Sequence[Study]) -> Answer:
        """Return a list of the studies, and which of them are made."""
        rows = [
            {
                "name": self._name(study),
                "title": study.title,
                "minutes": study.minutes,
                "number": study.number,
                "is_made": (self._folder(study) / records.RECORD).is_file(),
            }
            for study in studies
        ]
        width = max(len(self._name(study)) for study in studies)

        def show() -> None:
            for row in rows:
                number = "" if row["number"] is None else f"{row['number']}."
                made = "  made" if row["is_made"] else ""
                text = f"{row['name']:<{width}} {row['title']} (~{row['minutes']:g} min){made}"
                self._say(f"{number:>4} {text}")

        return Answer(record={"studies": rows}, show=show)

    def make_all(self, studies: Sequence[Study]) -> Answer:
        """Make the missing studies, print their findings, and return them.

        The exit code says too whether a claim does not hold, but for a smoke run's.
        """
        found: list[Record] = []
        for place, study in enumerate(studies, 1):
            record = self._make(study, f"{place}/{len(studies)}" if len(studies) > 1 else "")
            if record is not None:
                found.append(record)
                self.told.append(facts(record))
                if len(studies) == 1:
                    for table in study.tables(record.data(study)):
                        self.console.print(rich(table))
        self._sum_up(found)
        claims = code_of(f for record in found for f in record.findings)
        return self._answer(Exit.DONE if self.scope.smoke else claims)

    def _answer(self, code: Exit) -> Answer:
        codes = {code, *self.failed.values()}
        failed = {name: int(code) for name, code in self.failed.items()}
        return Answer(
            record={"studies": self.told, "failed": failed},
            code=next(code for code in _GRAVITY if code in codes),
        )

    def check(self, studies: Sequence[Study]) -> Answer:
        """Compare with the committed records, and return what differs."""
        found: list[Record] = []
        for study, kept in self._committed(studies):
            name, fresh = self._name(study), self._fresh(study)
            lines, how = check.rederived(study, kept), "findings derived again"
            if fresh is not None and fresh.config == kept.config:
                lines, how = check.differences(study, fresh, kept), "made again"
            self._say(f"{name}: {how}, {'differs' if lines else 'as committed'}")
            for line in lines:
                self._say(f"    {line}")
            if lines:
                self.failed[name] = Exit.NOT_SO
            self.told.append({**facts(kept), "check": how, "differences": lines})
            found.append(kept)
        self._sum_up(found)
        return self._answer(Exit.DONE)

    def rederive(self, studies: Sequence[Study]) -> Answer:
        """Write findings, pages and pictures of committed records anew, and return them."""
        found: list[Record] = []
        for study, kept in self._committed(studies):
            lines = check.rederived(study, kept)
            found.append(records.put(kept.folder, study, kept.header, kept.rows))
            self._say(f"{self._name(study)}: {kept.folder} is written anew from its rows")
            for line in lines:
                self._say(f"    {line}")
            self.told.append({**facts(found[-1]), "differences": lines})
        self._sum_up(found)
        return self._answer(Exit.DONE)

    def _committed(self, studies: Sequence[Study]) -> Iterator[tuple[Study, Record]]:
        """Yield studies with their committed records, and say of which there is none."""
        for study in studies:
            kept = records.committed(study.key)
            if kept is None:
                self._say(f"{self._name(study)}: no committed record")
            elif not kept.is_of(study):
                self._say(
                    f"{self._name(study)}: the committed record is of a former rule; make it anew"
                )
            else:
                yield study, kept

    def _fresh(self, study: Study) -> Record | None:
        """Return a record made here; now, if the study measures nothing and was asked for."""
        if study.exact and (self.named or self.group is not None):
            return self._make(study, "")
        try:
            return records.there(self._folder(study), study, self._config(study))
        except ConfigError:
            return None

    def _config(self, study: Study) -> dict[str, Any]:
        return study.config(study.scope(self.scope))

    def _make(self, study: Study, place: str) -> Record | None:
        """Return a study's record, made or found; None where it failed or lacks its input."""
        label = f"{place} {self._name(study)}".strip()
        try:
            return self._made(study, label)
        except NeedsInputError as error:
            return self._stand_in(study, label, error)
        except click.Abort:  # an Exception to Python, but it stops all studies
            raise
        except NoRoomError as error:
            self._fail(study, label, str(error), Exit.NO_ROOM)
        except ConfigError as error:
            self._fail(study, label, str(error), Exit.REFUSED)
        except (ZenFlowError, OSError) as error:
            self._fail(study, label, str(error), Exit.FAULT)
        except Exception as error:  # noqa: BLE001  (others are made; the exit code tells of it)
            self._fail(study, label, f"{type(error).__name__}: {error}", Exit.FAULT)
            self.console.print(traceback.format_exc(), markup=False)
        return None

    def _made(self, study: Study, label: str) -> Record:
        runner = Runner(
            study=study, scope=study.scope(self.scope), folder=self._folder(study),
            kept=self.keep / self._name(study), force=self.force, workers=self.workers,
            seconds=self.seconds, extend=self.extend,
        )  # fmt: skip
        with shown_progress(self.console, label) as progress:
            runner.progress = progress
            record = runner.run()
        self._tidy(runner.kept)
        if runner.made:
            seconds = record.header["seconds"]
            self._say(f"{label}: {record.folder / PICTURE} ({seconds:.0f} s)")
            if runner.left:
                self._say(f"{label}: {runner.left} cells are left: the same command goes on")
        else:
            if not (record.folder / PICTURE).is_file():
                records.draw(record.folder, study, record.data(study))
            self._say(f"{label}: done already")
        return record

    def _tidy(self, kept: Path) -> None:
        """Remove folders of kept cells that are empty now."""
        for folder in (kept.parent, self.keep):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()

    def _stand_in(self, study: Study, label: str, error: Exception) -> Record | None:
        """Take the committed record of a study whose input was not given."""
        shutil.rmtree(self.keep / self._name(study), ignore_errors=True)
        self._tidy(self.keep / self._name(study))
        kept = None if self.scope.smoke else records.committed(study.key)
        if kept is not None and kept.is_of(study) and self.group is not None:
            self._say(f"{label}: the committed record; to make it anew: {error}")
            return records.put(self._folder(study), study, kept.header, kept.rows)
        if self.named:
            self._fail(study, label, str(error), Exit.REFUSED)
        else:
            self._say(f"{label}: left out: {error}")
        return None

    def _fail(self, study: Study, label: str, text: str, code: Exit) -> None:
        self.failed[self._name(study)] = code
        self._say(f"{label}: failed: {text}")

    def _sum_up(self, found: Sequence[Record]) -> None:
        findings = [finding for record in found for finding in record.findings]
        if self.scope.smoke:
            self._say("A smoke run: its numbers say nothing about claims.")
        elif findings:
            for line in check.claims(findings):
                self._say(line)
            counts = {v: sum(f.verdict is v for f in findings) for v in Verdict}
            self._say(", ".join(f"{count} {v.plural}" for v, count in counts.items()))
        if self.failed:
            self._say(f"Failed: {', '.join(self.failed)}")

    def _name(self, study: Study) -> str:
        return study.name if self.group is not None else study.key

    def _folder(self, study: Study) -> Path:
        return self.out / self._name(study)

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False)


@contextmanager
def shown_progress(console: Console, label: str) -> Iterator[Any]:
    """Show a bar on a terminal; elsewhere a line when a study begins."""
    if not console.is_terminal:
        console.print(f"{label} ...", markup=False)
        yield lambda share, text: None
        return
    columns = (TextColumn("{task.description:<24}"), BarColumn(bar_width=24),
               TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn(),
               TextColumn("{task.fields[what]}"))  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(label, total=1.0, what="")
        yield lambda share, text: bar.update(task, completed=share, what=text)
