"""Study: cells, and pure functions of the rows that they give.

`Study.run` measures, trains or simulates one cell. Everything else follows from the rows, so that
a committed record is enough to get findings, tables and picture again.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from experiments.lab.columns import Table
from experiments.lab.finding import Finding
from experiments.output.files import strict
from zenflow.config import ZenFlowConfig
from zenflow.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Data = dict[str, Any]
"""JSON-ready: numbers, texts, None, lists and dicts with texts as keys."""
Row = dict[str, Any]
"""Result of one cell, JSON-ready."""
Progress = Callable[[float, str], None]
"""Takes the share that is done, 0 to 1, and what is being done."""
Option = Literal["data_dir", "dataset", "model"]


OWN = "this study"
"""Value under ``source`` of rows that a study made itself, where others are from records."""


class NeedsInputError(ConfigError):
    """A study can't be made without an option; the message says which.

    Raised by a study's functions of a scope, or by `Study.run`. The committed record then stands
    in for a figure of the paper.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Extent of a study as asked for: its inputs, seeds and size."""

    smoke: bool = False
    """Whether seconds are enough, with numbers that mean nothing."""
    seeds: tuple[int, ...] | None = None
    """Seeds of the cells; None leaves the choice to the study."""
    data_dir: Path | None = None
    """Folder of sentences. It reaches the studies that declare it, as do the next two."""
    dataset: str | None = None
    """Name of a data set on the hub."""
    model: str | None = None
    """Name or place of a pretrained model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One piece of a study's work, which gives one row."""

    settings: Mapping[str, Any]
    """Values that decide the row, JSON-ready: the cell's identity. The row repeats them."""
    labels: Mapping[str, Any] = field(default_factory=dict)
    """Values for the reader, which the row repeats as well."""
    needs: tuple[Cell, ...] = ()
    """Cells made before this one by the same program on the same machine."""
    work: Any = None
    """Settings that `Study.run` needs besides, such as those of a training: no part of the
    identity."""

    @property
    def name(self) -> str:
        """Short text for people."""
        shown = {**self.labels, **self.settings}.values()
        plain = [value for value in shown if isinstance(value, str | int | float)]
        return " ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in plain)

    @property
    def key(self) -> str:
        """Identity as text."""
        return identity(self.settings)

    @property
    def slug(self) -> str:
        """Name of the cell's files: readable, and different for different cells."""
        digest = hashlib.sha256(self.key.encode()).hexdigest()[:8]
        return f"{re.sub('[^A-Za-z0-9.=+-]+', '_', self.name)[:80]}_{digest}"


def identity(settings: Mapping[str, Any]) -> str:
    """Return settings as text, the same for settings that mean the same.

    Values that are None count as absent. In a ``config``, fields that a record has from before
    they existed take their defaults; one with fields that are no more is like none of today's.
    """
    known = {name: value for name, value in settings.items() if value is not None}
    if "config" in known:
        known["config"] = {**ZenFlowConfig().to_dict(), **known["config"]}
    return json.dumps(strict(known), sort_keys=True)


def no_progress(share: float, text: str) -> None:
    """Show nothing."""
    del share, text


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(Scope):
    """Circumstances under which a cell is made: what is asked for, and where it goes."""

    folder: Path
    """Existing folder of the cell's partial results. It survives an interruption, and the same
    cell gets it again; once the study is done it is removed."""
    needs: Mapping[str, Row] = field(default_factory=dict)
    """Rows of the cells that this one needs, by slug."""
    progress: Progress = no_progress
    """Called with the cell's own progress."""

    @property
    def seed(self) -> int:
        """First seed of the scope."""
        return (self.seeds or (0,))[0]

    def row_of(self, need: Cell) -> Row:
        """Return the row of a cell that this one needs."""
        return self.needs[need.slug]

    def folder_of(self, need: Cell) -> Path:
        """Return the folder of a cell that this one needs."""
        return self.folder.parent / need.slug


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """One study: how its numbers are made, judged, tabled and drawn."""

    name: str
    """Name that a person types, equal to the module's."""
    title: str
    """Headline of the record."""
    minutes: float
    """Time that all cells take on two cores, about."""
    cells: Callable[[Scope], Sequence[Cell]]
    """Cells that a scope asks for, in the order of the rows; the most telling first."""
    run: Callable[[Cell, Job], Row]
    """Function that makes a cell's row, without its settings and labels. Raises KeyboardInterrupt
    where it was stopped; a ZenFlowError or OSError has a message for the person."""
    summarise: Callable[[Sequence[Row], Data], Data]
    """Function of rows and config that gives the data for findings, tables and picture."""
    findings: Callable[[Data], Sequence[Finding]]
    """Claims with the numbers that decide them."""
    draw: Callable[[Data], Figure]
    """Picture of the data."""
    about: Callable[[Data], str] = lambda data: ""
    """Paragraphs on how the numbers are to be read, in Markdown."""
    tables: Callable[[Data], Sequence[Table]] = lambda data: ()
    """Tables of the record."""
    settings: Callable[[Scope], Data] = lambda scope: {}
    """Settings that all cells share, part of the config."""
    group: str = ""
    """Name of the group that the study belongs to: ``paper``, ``whatif``, or none."""
    number: int | None = None
    """Place in the group's list; None is beside it."""
    seeds: tuple[int, ...] = (0,)
    """Seeds where none are asked for; a smoke test takes the first."""
    one_at_a_time: bool = False
    """Whether cells are timed, so that none may run beside another."""
    reuses: tuple[str, ...] = ()
    """Studies whose committed rows stand for cells of the same identity, if the record is of the
    study's present revision."""
    exact: bool = False
    """Whether nothing is measured: the same on every machine, but for the last digits."""
    tolerance: float | None = None
    """Share of a recorded number by which one made again may differ; None compares verdicts only.
    It is of no use to an exact study."""
    unchecked: frozenset[str] = frozenset()
    """Keys of the data, at any depth, that are never compared: a clock's seconds, say."""
    uses: frozenset[Option] = frozenset()
    """Options of a scope that are handed on."""
    page: str = ""
    """Page of the repository that prints every finding of the committed record, with its source;
    empty where the record's own page does."""
    revision: int = 1
    """Number raised when rows change their meaning: records of an earlier one don't count."""

    @property
    def key(self) -> str:
        """Name among all studies: that of the group comes first."""
        return f"{self.group}/{self.name}" if self.group else self.name

    def scope(self, asked: Scope) -> Scope:
        """Return the scope with this study's seeds, without options that it does not use."""
        used = {name: getattr(asked, name) for name in self.uses}
        seeds = self.seeds[:1] if asked.smoke else self.seeds
        return Scope(smoke=asked.smoke, seeds=asked.seeds or seeds, **used)

    def config(self, scope: Scope) -> Data:
        """Return the facts that all rows of a record share and that decide them."""
        given: Data = {name: getattr(scope, name) for name in sorted(self.uses)}
        if given.get("data_dir") is not None:
            given["data_dir"] = given["data_dir"].resolve().name
        own = self.settings(scope)
        return as_json({"revision": self.revision, "smoke": scope.smoke, **given, **own})


def as_json(value: Data) -> Data:
    """Return data as a file of JSON gives them back: lists for tuples, null for not finite."""
    plain: Data = json.loads(json.dumps(strict(value)))
    return plain


def computed(*, make: Callable[[Job], Data], **fields: Any) -> Study:
    """Return a study of a single cell, whose row is the data.

    Args:
        make: Function that returns the data.
        fields: Other fields of the study.
    """
    return Study(
        cells=lambda scope: (Cell(settings={}),),
        run=lambda _, job: make(job),
        summarise=lambda rows, _: rows[0],
        settings=lambda scope: {"seed": _only_seed(scope)},
        **fields,
    )


def _only_seed(scope: Scope) -> int:
    seeds = scope.seeds or (0,)
    if len(seeds) > 1:
        raise ConfigError(
            f"this study takes one seed, but got {', '.join(map(str, seeds))}: give one of them"
        )
    return seeds[0]
