"""A sweep's table, from CSV or Parquet to columns that a page can sort and draw as a heat map."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from zenflow.errors import ConfigError

if TYPE_CHECKING:
    import pandas as pd

TABLES = ("table.csv", "table.parquet", "trials.csv")
"""Files that `zenflow sweep` and `zenflow tune` leave."""
_RECORDS = ("provenance.json", "summary.json", "sweep.json")
"""Files beside them: axes, what the figures are, and where they were made."""
_MOST_CELLS = 120_000
_MOST_LEVELS = 40
_DIGITS = 6

Cell = str | float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a table."""

    name: str
    values: Sequence[Cell]
    """Numbers, or texts; None where the cell is empty."""
    is_axis: bool
    """Whether the sweep varied it."""
    meaning: str
    """Empty where the record says nothing of it."""

    @property
    def is_number(self) -> bool:
        """Whether all cells that are not empty are numbers."""
        return all(isinstance(value, float) for value in self.values if value is not None)

    @property
    def levels(self) -> list[Cell]:
        """Different values, in the order in which they come."""
        return list(dict.fromkeys(self.values))


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepTable:
    """A table, and what is known of it."""

    path: str
    columns: Sequence[Column]
    """Columns whose cells differ."""
    constants: Mapping[str, Cell]
    """The value of each column that has one alone."""
    num_rows: int
    """Number of rows in the file."""
    record: Mapping[str, Any]
    """The JSON beside the table; empty without one."""

    @property
    def source(self) -> str:
        """Kind of the numbers: measured, simulated, predicted."""
        told = self.record.get("figures_are") or self.record.get("kind")
        return str(told).partition(":")[0] if told else "source unknown"

    @property
    def question(self) -> str:
        """Question of a study; empty of a sweep that asks nothing."""
        return str(self.record.get("question") or "")

    @property
    def answer(self) -> Sequence[str]:
        """Answer of the study's record, in sentences."""
        found = self.record.get("answer")
        return [str(sentence) for sentence in found] if isinstance(found, list) else []

    @property
    def sessions(self) -> Sequence[Mapping[str, Any]]:
        """Provenance of the rows: of a sweep, each time it was taken up."""
        found = self.record.get("sessions")
        if isinstance(found, list):
            return [session for session in found if isinstance(session, Mapping)]
        return [self.record] if self.record else []

    @property
    def axes(self) -> list[Column]:
        """Columns that were varied, numbers first: strategies are compared, not run through."""
        found = [column for column in self.columns if column.is_axis]
        return sorted(found, key=lambda column: not column.is_number)

    @property
    def measures(self) -> list[Column]:
        """Numbers that came out, those first that say most."""
        found = [column for column in self.columns if column.is_number and not column.is_axis]
        words = ("step_seconds", "goodput", "tokens", "")
        return sorted(found, key=lambda c: [word in c.name for word in words].index(True))

    @property
    def rows(self) -> list[tuple[Cell, ...]]:
        """Rows that the page gets."""
        return list(zip(*(column.values for column in self.columns), strict=True))


def find_table(folder: Path) -> Path | None:
    """Return the table in a folder, None if there is none."""
    return next((folder / name for name in TABLES if (folder / name).is_file()), None)


def read_table(path: Path, record: Mapping[str, Any]) -> SweepTable:
    """Return the table of a CSV or Parquet file.

    Args:
        path: The file.
        record: The JSON beside it: ``axes``, also inside ``sweep``, or a search's ``space`` name
            what was varied, and ``columns`` says what each column means.

    Raises:
        ConfigError: The file can't be read, has no rows, or one of another length.
    """
    frame = _read_parquet(path) if path.suffix == ".parquet" else _read_csv(path)
    axes, meanings = _axes(record), record.get("columns")
    meanings = meanings if isinstance(meanings, Mapping) else {}
    same = {n for n in frame if len(frame) > 1 and frame[n].nunique(dropna=False) == 1}
    kept = frame.iloc[_kept(frame, axes - same if "sweep" in record else set())]
    cells = {str(name): _cells(kept[name].tolist()) for name in frame}
    columns = [
        Column(
            name=name,
            values=values,
            is_axis=name in axes if axes & set(frame) else _looks_like_axis(values),
            meaning=str(meanings.get(name, "")),
        )
        for name, values in cells.items()
        if name not in same
    ]
    return SweepTable(
        path=str(path),
        columns=columns,
        constants={name: cells[name][0] for name in cells if name in same},
        num_rows=len(frame),
        record=record,
    )


def _kept(frame: pd.DataFrame, grid: set[str]) -> NDArray[np.intp]:
    """Return the places of the rows that a page has room for, at equal distances.

    Of a grid some values of the longest axes are left out, so that it stays one.
    """
    import pandas as pd

    most = max(1, _MOST_CELLS // len(frame.columns))
    codes = {name: pd.factorize(frame[name])[0] for name in frame if name in grid}
    counts = {name: int(own.max()) + 1 for name, own in codes.items()}
    every = dict.fromkeys(codes, 1)
    kept = np.arange(len(frame))
    while len(kept) > most:
        longest = max(every, key=lambda name: counts[name] / every[name], default=None)
        if longest is None or counts[longest] <= 2 * every[longest]:
            return kept[:: -(-len(kept) // most)]
        every[longest] += 1
        chosen = [own % every[name] == 0 for name, own in codes.items()]
        kept = np.flatnonzero(np.logical_and.reduce(chosen))
    return kept


def record_beside(table: Path) -> Path | None:
    """Return the JSON file that tells of a table, None if there is none."""
    return next((table.parent / n for n in _RECORDS if (table.parent / n).is_file()), None)


def _read_parquet(path: Path) -> pd.DataFrame:
    import pandas as pd

    try:
        frame = pd.read_parquet(path)
    except (OSError, ValueError) as error:  # pyarrow's errors are ValueErrors
        raise ConfigError(f"{path} can't be read as Parquet ({error}): check the file") from error
    if not len(frame):
        raise ConfigError(f"{path} has no rows: let `zenflow sweep` finish a point")
    return frame


def _read_csv(path: Path) -> pd.DataFrame:
    import pandas as pd

    try:
        with open(path, encoding="utf-8", newline="") as file:
            lines = list(csv.reader(file))
    except (OSError, ValueError, csv.Error) as error:
        raise ConfigError(f"{path} can't be read as CSV ({error}): check the file") from error
    lines = [line for line in lines if line]
    if len(lines) < 2:
        raise ConfigError(
            f"{path} needs a line of names and a row at least, but has {len(lines)} lines: let "
            "`zenflow sweep` finish a point"
        )
    names, *rows = lines
    for number, row in enumerate(rows, start=2):
        if len(row) != len(names):
            raise ConfigError(
                f"{path}, row {number}: {len(row)} cells under {len(names)} names: the file was "
                "cut off or changed; write it anew"
            )
    columns = zip(names, zip(*rows, strict=True), strict=True)
    # As objects: pandas would make a missing text and a missing number the same.
    return pd.DataFrame({name: pd.Series(_typed(own), dtype=object) for name, own in columns})


def _typed(cells: Sequence[str]) -> list[Cell]:
    """Return numbers if all cells that aren't empty are numbers, else texts."""
    numbers: list[Cell] = []
    for cell in cells:
        if not cell:
            numbers.append(None)
            continue
        try:
            number = float(cell)
        except ValueError:
            return [cell or None for cell in cells]
        numbers.append(number)
    return numbers


def _cells(values: Sequence[Any]) -> list[Cell]:
    """Return a column's cells as a page has them."""
    return [_cell(value) for value in values]


def _cell(value: Any) -> Cell:
    if value is None or isinstance(value, str | bool):
        return str(value) if value else None
    # JSON has neither infinity nor nan; a page of SI values needs no more digits.
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None


def _axes(record: Mapping[str, Any]) -> set[str]:
    """Return the names of what was varied, however a record lists them."""
    sweep = record.get("sweep")
    places = (record, sweep if isinstance(sweep, Mapping) else {})
    told = next((p[key] for p in places for key in ("axes", "space") if key in p), None)
    if isinstance(told, Mapping):
        return set(told)
    if isinstance(told, list):
        return {str(item.get("name") if isinstance(item, Mapping) else item) for item in told}
    return set()


def _looks_like_axis(values: Sequence[Cell]) -> bool:
    """Return whether a column has few values that come again and again."""
    levels = set(values)
    return 1 < len(levels) <= _MOST_LEVELS and 2 * len(levels) <= len(values)
