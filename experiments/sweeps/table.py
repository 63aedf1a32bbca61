"""Table: a sweep's results as a tidy table, with where it comes from beside it.

It is Parquet, and CSV too where it is short enough to be read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.output.files import replacing, write_json, write_text
from experiments.sweeps.axes.kinds import Axis
from experiments.sweeps.columns import OK, RESULTS, TEXTS, Batch
from experiments.sweeps.grid import Sweep, notes_of
from zenflow.errors import ConfigError

if TYPE_CHECKING:
    import pandas as pd

CSV, PARQUET, PROVENANCE = "table.csv", "table.parquet", "provenance.json"
MOST_LINES = 100_000
"""Rows up to which a table is written as CSV too."""


def table_of(sweep: Sweep, found: Batch) -> pd.DataFrame:
    """Return a row for each point that has a result, in the grid's order: axes, then `RESULTS`.

    A column of results whose name an axis has is the axis.
    """
    import pandas as pd

    found = found.sorted()
    shape = [len(axis.values) for axis in sweep.axes]
    places = np.unravel_index(found.points, shape) if shape else ()
    own = {
        axis.name: pd.Series(list(axis.values)).take(place).reset_index(drop=True)
        for axis, place in zip(sweep.axes, places, strict=True)
    }
    results = {name: column for name, column in found.columns.items() if name not in own}
    return _typed(pd.DataFrame({**own, **results}), sweep.axes)


def read_table(folder: Path, axes: Sequence[Axis] = ()) -> pd.DataFrame:
    """Return the table that a sweep wrote into a folder.

    Raises:
        ConfigError: There is none.
    """
    import pandas as pd

    try:
        if (folder / CSV).exists():
            frame = pd.read_csv(folder / CSV, keep_default_na=False, na_values=[""])
        else:
            frame = pd.read_parquet(folder / PARQUET)
    except OSError as error:
        raise ConfigError(
            f"{folder} has no table that can be read: give the folder of a finished sweep"
        ) from error
    return _typed(frame, axes)


def _typed(frame: pd.DataFrame, axes: Sequence[Axis]) -> pd.DataFrame:
    """Return the table with numbers as floats and the rest as text, whatever is missing."""
    texts = {*TEXTS, *(axis.name for axis in axes if not axis.is_number)}
    for name in frame.columns:
        if name in texts:
            text = frame[name].astype(object)
            frame[name] = text.where(text.notna(), "").map(str)
        elif name in RESULTS:
            frame[name] = frame[name].astype(float)
    return frame


def predicted_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of a table that have a prediction."""
    return frame[frame["status"] == OK]


def write_table(
    sweep: Sweep, found: Batch, sessions: Sequence[Mapping[str, Any]], folder: Path
) -> list[Path]:
    """Write a sweep's table and provenance, each whole or not at all; return the files."""
    written = write_frame(table_of(sweep, found), folder)
    write_json(folder / PROVENANCE, record_of(sweep, found, sessions))
    return [*written, folder / PROVENANCE]


def write_frame(frame: pd.DataFrame, folder: Path) -> list[Path]:
    """Write a table as Parquet, and as CSV unless it is long; return the files."""
    files = []
    if len(frame) <= MOST_LINES:
        write_text(folder / CSV, frame.to_csv(index=False, lineterminator="\n"))
        files.append(folder / CSV)
    else:  # one of a part of the points would be taken for the table
        (folder / CSV).unlink(missing_ok=True)
    with replacing(folder / PARQUET) as draft:
        frame.to_parquet(draft, engine="pyarrow", index=False)
    return [*files, folder / PARQUET]


def record_of(sweep: Sweep, found: Batch, sessions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the origin of a table: the sweep, how points were found, and every session."""
    return {
        "kind": "predicted: nothing here was measured",
        "sweep": sweep.to_dict(),
        "num_points": sweep.num_points,
        "finished": len(found),
        "status": counted(found, "status"),
        "columns": {**{axis.name: _meaning(axis, sweep) for axis in sweep.axes}, **RESULTS},
        "assumed": notes_of(sweep),
        "sessions": list(sessions),
    }


def counted(found: Batch, name: str) -> dict[str, int]:
    """Return how many points have each text of a column, the most frequent first."""
    texts, counts = np.unique(found.columns[name].astype(str), return_counts=True)
    order = np.argsort(-counts, kind="stable")
    return {str(texts[at]): int(counts[at]) for at in order if texts[at]}


def _meaning(axis: Axis, sweep: Sweep) -> str:
    said = f"axis: {axis.kind.meaning}"
    if axis.kind.place == "knob" and any(a.name == "strategy" for a in sweep.axes):
        said += "; of zenflow and zenflow_paper: other strategies' rows repeat"
    return said
