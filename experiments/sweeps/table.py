"""Table: a sweep's rows as a tidy table, CSV and Parquet, with where it comes from beside it."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.output.files import replacing, write_json, write_text
from experiments.sweeps.axes import Axis
from experiments.sweeps.grid import Sweep, notes_of
from experiments.sweeps.points import OK, RESULTS, Row
from zenflow.errors import ConfigError

if TYPE_CHECKING:
    import pandas as pd

CSV, PARQUET, PROVENANCE = "table.csv", "table.parquet", "provenance.json"
TEXTS = ("status", "reason", "method", "device_name", "host_name", "link_name")
"""Columns of results that are no numbers."""


def table_of(sweep: Sweep, rows: Mapping[int, Row]) -> pd.DataFrame:
    """Return a row for each point that has one, in the grid's order: axes, then `RESULTS`.

    A column of results whose name an axis has is the axis.
    """
    import pandas as pd

    lines = [{**rows[index], **sweep.values(index)} for index in sorted(rows)]
    names = [axis.name for axis in sweep.axes]
    columns = [*names, *(name for name in RESULTS if name not in names)]
    frame = pd.DataFrame(lines, columns=columns)
    return _typed(frame, sweep.axes)


def read_table(folder: Path, axes: Sequence[Axis] = ()) -> pd.DataFrame:
    """Return the table that a sweep wrote into a folder.

    Raises:
        ConfigError: There is none.
    """
    import pandas as pd

    path = folder / CSV
    try:
        frame = pd.read_csv(path, keep_default_na=False, na_values=[""])
    except OSError as error:
        raise ConfigError(f"{path} can't be read: give the folder of a finished sweep") from error
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
    sweep: Sweep, rows: Mapping[int, Row], sessions: Sequence[Mapping[str, Any]], folder: Path
) -> list[Path]:
    """Write a sweep's table and provenance, each whole or not at all; return the files."""
    written = write_frame(table_of(sweep, rows), folder)
    write_json(folder / PROVENANCE, record_of(sweep, rows, sessions))
    return [*written, folder / PROVENANCE]


def write_frame(frame: pd.DataFrame, folder: Path) -> list[Path]:
    """Write a table as CSV, and as Parquet where pyarrow is installed; return the files."""
    write_text(folder / CSV, frame.to_csv(index=False, lineterminator="\n"))
    if importlib.util.find_spec("pyarrow") is None:
        return [folder / CSV]
    with replacing(folder / PARQUET) as draft:
        frame.to_parquet(draft, engine="pyarrow", index=False)
    return [folder / CSV, folder / PARQUET]


def record_of(
    sweep: Sweep, rows: Mapping[int, Row], sessions: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return where a table comes from: the sweep, how points were found, and every session."""
    return {
        "kind": "predicted: nothing here was measured",
        "sweep": sweep.to_dict(),
        "num_points": sweep.num_points,
        "finished": len(rows),
        "status": dict(Counter(row["status"] for row in rows.values())),
        "methods": dict(Counter(row["method"] for row in rows.values() if "method" in row)),
        "columns": {**{axis.name: _meaning(axis, sweep) for axis in sweep.axes}, **RESULTS},
        "assumed": notes_of(sweep),
        "sessions": list(sessions),
    }


def _meaning(axis: Axis, sweep: Sweep) -> str:
    said = f"axis: {axis.kind.help}" + (f", {axis.kind.unit}" if axis.kind.unit else "")
    if axis.kind.place == "knob" and any(a.name == "strategy" for a in sweep.axes):
        said += "; of zenflow and zenflow_paper: other strategies' rows repeat"
    return said
