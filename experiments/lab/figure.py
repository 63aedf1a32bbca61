"""What a figure of the paper is to ``zenflow figures``: three functions and how they may be used.

``make`` measures or simulates; ``findings`` and ``draw`` are pure functions of what it returned,
so that a committed record is enough to get verdicts and picture again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from experiments.lab.finding import Finding
from zenflow.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Data = dict[str, Any]
"""JSON-ready: numbers, texts, None, lists and dicts with texts as keys."""
Progress = Callable[[float, str], None]
"""Takes the share that is done, 0 to 1, and what is being done."""
Option = Literal["data_dir", "model"]


class NeedsInputError(ConfigError):
    """A figure can't be made without --data-dir or --model; the message says what it needs.

    Raised by `PaperFigure.make`. The committed record then stands in, if there is one.
    """


def no_progress(share: float, text: str) -> None:
    """Show nothing."""
    del share, text


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What `PaperFigure.make` is asked for."""

    folder: Path
    """Exists. Of partial results: it survives an interruption and is given again to the same
    command; once the figure is done it is removed."""
    smoke: bool = False
    """Seconds instead of minutes, with numbers that mean nothing."""
    seed: int = 0
    data_dir: Path | None = None
    """Only of figures that declare it; so is ``model``."""
    model: str | None = None
    progress: Progress = no_progress


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperFigure:
    """One figure: how its numbers are made, judged and drawn."""

    name: str
    """Its module's name in this package, and what a person types."""
    title: str
    make: Callable[[Job], Data]
    """Raises NeedsInputError; KeyboardInterrupt or click.Abort where it was stopped and has kept
    what it had in the job's folder; a ZenFlowError or OSError with a message for the person."""
    findings: Callable[[Data], Sequence[Finding]]
    draw: Callable[[Data], Figure]
    minutes: float
    """About how long `make` takes on two cores."""
    number: int | None = None
    """In the list of figures; None is beside it."""
    exact: bool = False
    """Nothing is measured: the same on every machine, but for the last digits."""
    tolerance: float | None = None
    """How far a number made again may be off the record's, as a share of it; None compares
    verdicts only. Of figures that are not exact."""
    unchecked: frozenset[str] = field(default_factory=frozenset)
    """Keys of the data, at any depth, that are never compared: a clock's seconds, say."""
    uses: frozenset[Option] = field(default_factory=frozenset)
    """Which of --data-dir and --model are handed on."""
    revision: int = 1
    """Raised when the numbers change their meaning: records of an earlier one are made again."""

    def config(self, job: Job) -> dict[str, Any]:
        """Return what decides the numbers; a record of the same is not made again."""
        return {
            "revision": self.revision,
            "smoke": job.smoke,
            "seed": job.seed,
            **({"data_dir": self._folder_name(job)} if "data_dir" in self.uses else {}),
            **({"model": job.model} if "model" in self.uses else {}),
        }

    def asked(self, job: Job) -> Job:
        """Return the job without the options that this figure does not use."""
        return replace(
            job,
            data_dir=job.data_dir if "data_dir" in self.uses else None,
            model=job.model if "model" in self.uses else None,
        )

    @staticmethod
    def _folder_name(job: Job) -> str | None:
        return None if job.data_dir is None else job.data_dir.resolve().name
