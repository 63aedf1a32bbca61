"""``zenflow study`` and ``zenflow figures``: make studies, and check what they found before."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from experiments.commands.command import Command, with_flags
from experiments.commands.flag_types import FOLDER, PATH, FlagType
from zenflow.errors import ConfigError, ZenFlowError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from experiments.lab.record import Record
    from experiments.lab.study import Scope, Study

OUT = Path("runs") / "studies"
FIGURES = Path("runs") / "figures"
_PARTIAL = ".partial"
_STOPPED = 130


class _Seeds(FlagType):
    """Whole numbers with commas between."""

    name = "seeds"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        """Return the seeds, each once."""
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in str(value).split(",") if part.strip()]
        if not parts or not all(part.isdecimal() for part in parts):
            self.fail(f"seeds are whole numbers with commas between, but got {value!r}: 0,1,2")
        return tuple(dict.fromkeys(map(int, parts)))


_common = with_flags(
    click.option("--smoke", is_flag=True, help="Seconds: that it works, not what it shows."),
    click.option("--force", is_flag=True, help="Make again what is done already."),
    click.option("--check", "checks", is_flag=True, help="Compare with the committed records."),
    click.option("--list", "lists", is_flag=True, help="Say what there is."),
    click.option("--workers", type=click.IntRange(1), default=1, show_default=True,
                 help="Cells at a time, where none is timed."),
    click.option("--data-dir", type=PATH,
                 help="Folder of train.tsv and test.tsv: sentences, tab, 0 or 1."),
    click.option("--model", help="Pretrained encoder: a directory, a hub name, package:NAME."),
)  # fmt: skip
"""Flags that both commands have."""


@click.command(cls=Command, name="study")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--seeds", type=_Seeds(), help="Seeds, as in 0,1,2; default: the study's own.")
@click.option(
    "--record", type=FOLDER, default=OUT, show_default=True,
    help="One folder a study goes here: its record.",
)  # fmt: skip
@click.option(
    "--keep", type=FOLDER,
    help="Where cells are kept until the record is there; default: beside the records.",
)  # fmt: skip
@click.option("--dataset", help="In place of --data-dir a data set of the hub.")
@_common
def study_command(
    names: tuple[str, ...], record: Path, keep: Path | None, lists: bool, **flags: Any
) -> None:
    """Make studies: those that are named, a group such as paper, or all.

    Each leaves a record: its rows, findings with verdicts, tables and a picture. Cells that are
    there already are not made again, so after an interruption the same command goes on.
    --check derives the findings of the committed records again; a study that is named and needs
    no measurement is made for it.
    """
    if not names and not lists and not flags["checks"]:
        raise ConfigError("name studies, or say all: --list shows what there is")
    _carry_out(names, record, keep, lists=lists, **flags)


@click.command(cls=Command, name="figures")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option(
    "--out", type=FOLDER, default=FIGURES, show_default=True, help="One folder a figure goes here."
)
@_common
def figures_command(names: tuple[str, ...], seed: int, out: Path, **flags: Any) -> None:
    """Make figures of the ZenFlow paper again: all of them, or those that are named.

    Each leaves a record and a picture, and says which of the paper's claims hold. What is done
    already is left alone; after an interruption the same command goes on. --check compares with
    the committed records: figures that need no measurement are made for it, of others those in
    --out are taken.
    """
    from experiments.lab.catalogue import PAPER

    _carry_out(names, out, None, group=PAPER, seeds=(seed,), dataset=None, **flags)


def _carry_out(
    names: Sequence[str],
    out: Path,
    keep: Path | None,
    *,
    group: str | None = None,
    seeds: tuple[int, ...] | None,
    smoke: bool,
    force: bool,
    checks: bool,
    lists: bool,
    workers: int,
    data_dir: Path | None,
    dataset: str | None,
    model: str | None,
) -> None:
    from rich.console import Console

    from experiments.lab import catalogue
    from experiments.lab.study import Scope

    studies = [catalogue.load(name) for name in catalogue.chosen(names, group)]
    if checks and smoke:
        raise ConfigError("--check compares whole studies: leave out --smoke")
    if data_dir is not None and not data_dir.is_dir():
        raise ConfigError(f"--data-dir {data_dir} is no directory: check the path")
    console = Console(highlight=False, soft_wrap=True)
    scope = Scope(smoke=smoke, seeds=seeds, data_dir=data_dir, dataset=dataset, model=model)
    session = _Session(
        out=out, keep=keep or out / _PARTIAL, scope=scope, force=force, workers=workers,
        named=bool(names) and "all" not in names, group=group, console=console,
    )  # fmt: skip
    if lists:
        session.list(studies)
        return
    if not checks:
        _refuse_unused(studies, names, scope)
    try:
        sys.exit(session.check(studies) if checks else session.make_all(studies))
    except (KeyboardInterrupt, click.Abort):
        console.print(
            f"Stopped. What is done is kept in {session.keep}: the same command goes on.",
            markup=False,
        )
        sys.exit(_STOPPED)


def _refuse_unused(studies: Sequence[Study], names: Sequence[str], scope: Scope) -> None:
    for option in ("data_dir", "dataset", "model"):
        if getattr(scope, option) is not None and not any(option in s.uses for s in studies):
            flag = "--" + option.replace("_", "-")
            raise ConfigError(f"{flag} is of no use to {', '.join(names)}: leave it out")


@dataclass(slots=True, kw_only=True)
class _Session:
    """One call of a command."""

    out: Path
    """Folder of the records."""
    keep: Path
    """Folder of what interrupted studies keep."""
    scope: Scope
    """What all studies are asked for."""
    force: bool
    """Whether what is done is made again."""
    workers: int
    """Number of cells at a time."""
    named: bool
    """Whether the studies were asked for by name."""
    group: str | None
    """Group that is left out of names and folders."""
    console: Console
    """Where everything is said."""
    failed: list[str] = field(default_factory=list)
    """Names of the studies that failed or differ."""

    def list(self, studies: Sequence[Study]) -> None:
        """Say what there is, and what is made."""
        from experiments.lab.record import RECORD

        for study in studies:
            number = "" if study.number is None else f"{study.number}."
            made = "  made" if (self._folder(study) / RECORD).is_file() else ""
            text = f"{self._name(study):<24} {study.title} (~{study.minutes:g} min){made}"
            self._say(f"{number:>4} {text}")

    def make_all(self, studies: Sequence[Study]) -> int:
        """Make what is not done, say what was found, and return the exit code."""
        found: list[Record] = []
        for place, study in enumerate(studies, 1):
            record = self._make(study, f"{place}/{len(studies)}" if len(studies) > 1 else "")
            if record is not None:
                found.append(record)
                if len(studies) == 1:
                    self._show_tables(study, record)
        self._sum_up(found)
        return 1 if self.failed else 0

    def check(self, studies: Sequence[Study]) -> int:
        """Compare with the committed records and return the exit code."""
        from experiments.lab import check
        from experiments.lab import record as records

        found: list[Record] = []
        for study in studies:
            name = self._name(study)
            kept = records.committed(study.key)
            if kept is None:
                self._say(f"{name}: no committed record")
                continue
            fresh = self._fresh(study)
            lines, how = check.rederived(study, kept), "findings derived again"
            if fresh is not None and fresh.config == kept.config:
                lines, how = check.differences(study, fresh, kept), "made again"
            self._say(f"{name}: {how}, {'differs' if lines else 'as committed'}")
            for line in lines:
                self._say(f"    {line}")
            if lines:
                self.failed.append(name)
            found.append(kept)
        self._sum_up(found)
        return 1 if self.failed else 0

    def _fresh(self, study: Study) -> Record | None:
        """Return a record made here; now, if the study measures nothing and was asked for."""
        from experiments.lab import record as records

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
        from experiments.lab.study import NeedsInputError

        label = f"{place} {self._name(study)}".strip()
        try:
            return self._made(study, label)
        except NeedsInputError as error:
            return self._stand_in(study, label, error)
        except click.Abort:  # an Exception to Python, but it stops all studies
            raise
        except (ZenFlowError, OSError) as error:
            self._fail(study, label, str(error))
        except Exception as error:  # noqa: BLE001  (others are made; the exit code tells of it)
            self._fail(study, label, f"{type(error).__name__}: {error}")
            self.console.print(traceback.format_exc(), markup=False)
        return None

    def _made(self, study: Study, label: str) -> Record:
        from experiments.lab.page import PICTURE
        from experiments.lab.record import draw
        from experiments.lab.runner import Runner

        runner = Runner(
            study=study, scope=study.scope(self.scope), folder=self._folder(study),
            kept=self.keep / self._name(study), force=self.force, workers=self.workers,
        )  # fmt: skip
        with self._bar(label) as progress:
            runner.progress = progress
            record = runner.run()
        self._tidy(runner.kept)
        if runner.made:
            seconds = record.header["seconds"]
            self._say(f"{label}: {record.folder / PICTURE} ({seconds:.0f} s)")
        else:
            if not (record.folder / PICTURE).is_file():
                draw(record.folder, study, record.data(study))
            self._say(f"{label}: done already")
        return record

    def _tidy(self, kept: Path) -> None:
        """Remove folders of kept cells that are empty now."""
        for folder in (kept.parent, self.keep):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()

    def _stand_in(self, study: Study, label: str, error: Exception) -> Record | None:
        """Take the committed record of a study whose input was not given."""
        import shutil

        from experiments.lab import record as records

        shutil.rmtree(self.keep / self._name(study), ignore_errors=True)
        self._tidy(self.keep / self._name(study))
        kept = None if self.scope.smoke else records.committed(study.key)
        if kept is not None and self.group is not None:
            self._say(f"{label}: the committed record; to make it anew: {error}")
            return records.put(self._folder(study), study, kept.header, kept.rows)
        if self.named:
            self._fail(study, label, str(error))
        else:
            self._say(f"{label}: left out: {error}")
        return None

    def _fail(self, study: Study, label: str, text: str) -> None:
        self.failed.append(self._name(study))
        self._say(f"{label}: failed: {text}")

    def _show_tables(self, study: Study, record: Record) -> None:
        from experiments.lab.columns import rich

        for table in study.tables(record.data(study)):
            self.console.print(rich(table))

    def _sum_up(self, found: Sequence[Record]) -> None:
        from experiments.lab import check
        from experiments.lab.finding import Verdict

        if self.scope.smoke:
            self._say("A smoke run: its numbers say nothing about claims.")
        else:
            findings = [finding for record in found for finding in record.findings]
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
    def _bar(self, label: str) -> Iterator[Any]:
        """Show a bar on a terminal; elsewhere a line when a study begins."""
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        if not self.console.is_terminal:
            self._say(f"{label} ...")
            yield lambda share, text: None
            return
        columns = (TextColumn("{task.description:<24}"), BarColumn(bar_width=24),
                   TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn(),
                   TextColumn("{task.fields[what]}"))  # fmt: skip
        with Progress(*columns, console=self.console, transient=True) as bar:
            task = bar.add_task(label, total=1.0, what="")
            yield lambda share, text: bar.update(task, completed=share, what=text)
