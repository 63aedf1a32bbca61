"""``zenflow figures``: makes the paper's figures again, one folder and one verdict list each."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zenflow.errors import ConfigError, ZenFlowError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from experiments.lab.figure import Job, PaperFigure
    from experiments.lab.record import Record

OUT = Path("runs") / "figures"
_STOPPED = 130


@click.command(name="figures")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--smoke", is_flag=True, help="Seconds a figure: that it works, not what it shows.")
@click.option("--force", is_flag=True, help="Make again what is done already.")
@click.option("--check", "checks", is_flag=True, help="Compare with the committed records.")
@click.option("--list", "lists", is_flag=True, help="Say what figures there are.")
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), default=OUT, show_default=True,
    help="One folder a figure goes here.",
)  # fmt: skip
@click.option(
    "--data-dir", type=click.Path(path_type=Path), help="Sentences, of the accuracy figure."
)
@click.option("--model", help="Pretrained encoder, of the accuracy figure.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
def figures_command(
    names: tuple[str, ...],
    smoke: bool,
    force: bool,
    checks: bool,
    lists: bool,
    out: Path,
    data_dir: Path | None,
    model: str | None,
    seed: int,
) -> None:
    """Make figures of the ZenFlow paper again: all of them, or those that are named.

    Each leaves a record and a picture, and says which of the paper's claims hold. What is done
    already is left alone; after an interruption the same command goes on. --check compares with
    the committed records: figures that need no measurement are made for it, of others those in
    --out are taken.
    """
    from rich.console import Console

    from experiments.lab.figure import Job
    from experiments.paper import catalogue

    try:
        catalogue.check(names)
        if checks and smoke:
            raise ConfigError("--check compares whole figures: leave out --smoke")
        if data_dir is not None and not data_dir.is_dir():
            raise ConfigError(f"--data-dir {data_dir} is no directory: check the path")
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    figures = [catalogue.load(name) for name in names or catalogue.names()]
    if lists:
        _list(figures, out)
        return
    if not checks:
        _refuse_unused(figures, names, data_dir, model)
    job = Job(folder=out, smoke=smoke, seed=seed, data_dir=data_dir, model=model)
    console = Console(highlight=False, soft_wrap=True)
    session = _Session(out=out, job=job, force=force, named=bool(names), console=console)
    try:
        sys.exit(session.check(figures) if checks else session.make_all(figures))
    except (KeyboardInterrupt, click.Abort):
        console.print(
            f"Stopped. What is done is kept in {out}: the same command goes on.", markup=False
        )
        sys.exit(_STOPPED)


def _refuse_unused(
    figures: Sequence[PaperFigure], names: Sequence[str], data_dir: Path | None, model: str | None
) -> None:
    for option, value in {"data_dir": data_dir, "model": model}.items():
        if value is not None and not any(option in figure.uses for figure in figures):
            flag = "--" + option.replace("_", "-")
            raise click.UsageError(f"{flag} is of no use to {', '.join(names)}: leave it out")


def _list(figures: Sequence[PaperFigure], out: Path) -> None:
    from experiments.lab.record import RECORD

    for figure in figures:
        number = "" if figure.number is None else f"{figure.number}."
        made = "  made" if (out / figure.name / RECORD).is_file() else ""
        click.echo(f"{number:>4} {figure.name:<18} {figure.title} (~{figure.minutes:g} min){made}")


@dataclass(slots=True, kw_only=True)
class _Session:
    """One call of the command."""

    out: Path
    job: Job
    """Job without a folder of its own yet."""
    force: bool
    named: bool
    """Whether the figures were asked for by name."""
    console: Console
    failed: list[str] = field(default_factory=list)

    def make_all(self, figures: Sequence[PaperFigure]) -> int:
        """Make what is not done, say what was found, and return the exit code."""
        found: list[Record] = []
        for place, figure in enumerate(figures, 1):
            record = self._make(figure, f"{place}/{len(figures)}")
            if record is not None:
                found.append(record)
        self._sum_up(found)
        return 1 if self.failed else 0

    def check(self, figures: Sequence[PaperFigure]) -> int:
        """Compare with the committed records and return the exit code."""
        from experiments.lab import check
        from experiments.lab import record as records

        found: list[Record] = []
        for figure in figures:
            kept = records.committed(figure.name)
            if kept is None:
                self._say(f"{figure.name}: no committed record")
                continue
            fresh = records.done(self.out, figure, self.job)
            if figure.exact and (fresh is None or self.force):
                fresh = self._make(figure, "")
            lines, how = check.rederived(figure, kept), "findings derived again"
            if fresh is not None and fresh.config == kept.config:
                lines, how = check.differences(figure, fresh, kept), "made again"
            self._say(f"{figure.name}: {how}, {'differs' if lines else 'as committed'}")
            for line in lines:
                self._say(f"    {line}")
            if lines:
                self.failed.append(figure.name)
            found.append(kept)
        self._sum_up(found)
        return 1 if self.failed else 0

    def _make(self, figure: PaperFigure, place: str) -> Record | None:
        """Return a figure's record, made or found; None where it failed or lacks its input."""
        from experiments.lab import record as records
        from experiments.lab.figure import NeedsInputError

        label = f"{place} {figure.name}".strip()
        before = None if self.force else records.done(self.out, figure, self.job)
        try:
            if before is not None:
                if not (before.folder / records.PICTURE).is_file():
                    records.draw(before.folder, figure, before.data)
                self._say(f"{label}: done already")
                return before
            return self._made(figure, label)
        except NeedsInputError as error:
            return self._stand_in(figure, label, error)
        except click.Abort:  # an Exception to Python, but it stops all figures
            raise
        except (ZenFlowError, OSError) as error:
            self._fail(figure, label, str(error))
        except Exception as error:  # noqa: BLE001  (others are made; the exit code tells of it)
            self._fail(figure, label, f"{type(error).__name__}: {error}")
            self.console.print(traceback.format_exc(), markup=False)
        return None

    def _made(self, figure: PaperFigure, label: str) -> Record:
        from dataclasses import replace

        from experiments.lab import record as records

        if self.force:
            records.drop_partial(self.out, figure, self.job)
        folder = records.partial_folder(self.out, figure, self.job)
        job = replace(figure.asked(self.job), folder=folder)
        begun = time.monotonic()
        with self._bar(label) as progress:
            data = figure.make(replace(job, progress=progress))
            seconds = time.monotonic() - begun
            record = records.write(self.out, figure, job, data, seconds)
        records.drop_partial(self.out, figure, self.job)
        self._say(f"{label}: {record.folder / records.PICTURE} ({seconds:.0f} s)")
        return record

    def _stand_in(self, figure: PaperFigure, label: str, error: Exception) -> Record | None:
        """Take the committed record of a figure whose input was not given."""
        from experiments.lab import record as records

        records.drop_partial(self.out, figure, self.job)
        kept = None if self.job.smoke else records.committed(figure.name)
        if kept is not None:
            self._say(f"{label}: the committed record; to make it anew: {error}")
            return records.adopt(self.out, figure, kept)
        if self.named:
            self._fail(figure, label, str(error))
        else:
            self._say(f"{label}: left out: {error}")
        return None

    def _fail(self, figure: PaperFigure, label: str, text: str) -> None:
        self.failed.append(figure.name)
        self._say(f"{label}: failed: {text}")

    def _sum_up(self, found: Sequence[Record]) -> None:
        from experiments.lab import check
        from experiments.lab.finding import Verdict

        if self.job.smoke:
            self._say("A smoke run: its numbers say nothing about claims.")
        else:
            findings = [finding for record in found for finding in record.findings]
            for line in check.claims(findings):
                self._say(line)
            counts = {v: sum(f.verdict is v for f in findings) for v in Verdict}
            self._say(", ".join(f"{count} {v.plural}" for v, count in counts.items()))
        if self.failed:
            self._say(f"Failed: {', '.join(self.failed)}")

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False)

    @contextmanager
    def _bar(self, label: str) -> Iterator[Any]:
        """Show a bar on a terminal; elsewhere a line when a figure begins."""
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
