"""Outputs: a sweep's pictures, and what is printed of its table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.sweeps.columns import OK, RESULTS, TEXTS, Batch
from experiments.sweeps.grid import Sweep
from experiments.sweeps.prices import COLUMN
from experiments.sweeps.table import counted
from zenflow.config import unknown_name
from zenflow.errors import ConfigError

if TYPE_CHECKING:
    import pandas as pd

PICTURE, PARETO = "picture.png", "pareto.png"
AGAINST = ("device_bytes", "host_bytes", "staleness_steps", COLUMN)
"""Columns that what is shown is traded for."""


def check_value(name: str) -> None:
    """Refuse a column that no picture can show.

    Raises:
        ConfigError: It is unknown, or no number.
    """
    known = [column for column in RESULTS if column not in TEXTS] + [COLUMN]
    if name not in known:
        raise ConfigError(f"--value {unknown_name(name, known)}")


def write_pictures(frame: pd.DataFrame, sweep: Sweep, value: str, folder: Path) -> list[Path]:
    """Draw a table; return the pictures' files, those that there is something to show in."""
    from experiments.output.plots import save_figure
    from experiments.sweeps.pictures.fronts import draw_pareto
    from experiments.sweeps.pictures.plots import draw_sweep

    if value not in frame:
        raise ConfigError(f"--value {value}: give --price too")
    files = []
    for name, figure in (
        (PICTURE, draw_sweep(frame, sweep.axes, value)),
        (PARETO, draw_pareto(frame, sweep.axes, value, AGAINST)),
    ):
        if figure is not None:
            save_figure(figure, folder / name)
            files.append(folder / name)
    return files


def summary(sweep: Sweep, found: Batch, *, shown: int) -> str:
    """Return the counts of points by outcome, and the fastest ones."""
    listed = ", ".join(f"{count} {status}" for status, count in counted(found, "status").items())
    lines = [
        f"{len(found)} of {sweep.num_points} points: {listed or 'none'}. Predicted, not measured."
    ]
    best = fastest(sweep, found, shown=shown)
    for row in best:
        point = ", ".join(f"{name}={value}" for name, value in row["point"].items())
        lines.append(
            f"  {row['step_seconds']:.4g} s a step, {row['tokens_per_second']:,.0f} tokens/s, "
            f"{row['stall_share']:.1%} stalled: {point}"
        )
    if len(found) and not best:
        lines.append(f"  none has a prediction; the first says: {found.columns['reason'][0]}")
    return "\n".join(lines)


def fastest(sweep: Sweep, found: Batch, *, shown: int) -> list[dict[str, Any]]:
    """Return the rows of the fastest points that fit, each with its values on the axes."""
    predicted = found.where(found.columns["status"] == OK)
    order = np.argsort(-predicted.columns["tokens_per_second"], kind="stable")[:shown]
    return [{"point": sweep.values(index), **row} for index, row in predicted.where(order).rows()]
