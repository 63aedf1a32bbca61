"""Published measurements of others' machines beside their predictions.

``python -m experiments.studies.published.study`` writes
``experiments/results/<date>_published_<cpu>/`` in less than a minute. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from experiments.literature.measurements import GROUPS, MEASUREMENTS
from experiments.literature.setups import AnySetup, Measurement, Quantity
from experiments.output.files import write_json, write_text
from experiments.output.provenance import provenance, results_folder
from experiments.studies.published.predictions import (
    deepspeed_rate,
    elasticities,
    hardware_of,
    interval,
    predict,
    runs_deepspeed_step,
    step_bytes,
)

RECORD = "rows.json"
TABLE = "table.txt"
FORMAT = 1
AIM = 0.15
"""Absolute error within which a prediction counts as met."""
_DRAWS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A measurement beside its prediction, seconds."""

    measurement: Measurement
    predicted: float
    roofline: float | None
    """As if DeepSpeed's CPU step reached the DRAM bandwidth; None where it does not run."""
    interval: tuple[float, float] | None
    """That holds 0.8 of the predictions with figures drawn by their uncertainty."""
    elasticities: Mapping[str, float]
    """Per cent of the prediction for one per cent of a figure; of missed rows."""
    alternatives: Mapping[str, float]
    """Predictions with other values of what is unknown; of missed rows."""

    @property
    def error(self) -> float:
        """Predicted over measured, minus 1."""
        return self.predicted / self.measurement.seconds - 1.0

    def to_dict(self) -> dict[str, Any]:
        """Return every figure by name."""
        return {
            "group": self.measurement.group,
            "label": self.measurement.label,
            "quantity": self.measurement.quantity,
            "measured_seconds": self.measurement.seconds,
            "predicted_seconds": self.predicted,
            "error": self.error,
            "interval_seconds": None if self.interval is None else list(self.interval),
            "roofline_seconds": self.roofline,
            "elasticities": dict(self.elasticities),
            "alternatives": dict(self.alternatives),
            "source": self.measurement.source,
            "assumption": self.measurement.assumption,
        }


def predict_all(
    measurements: Sequence[Measurement] = MEASUREMENTS, *, draws: int = _DRAWS
) -> list[Row]:
    """Return every measurement beside its prediction; 0 draws are no intervals."""
    # Several measurements are of one set-up.
    predictions: dict[str, float] = {}
    bounds: dict[str, tuple[float, float]] = {}
    moves: dict[str, Mapping[str, float]] = {}
    rows = []
    for item in measurements:
        setup, quantity = item.setup, item.quantity
        key = f"{setup} {quantity}"
        if key not in predictions:
            predictions[key] = predict(setup, quantity)
            if draws:
                found = interval(setup, quantity, draws)
                bounds[key] = found.low, found.high
        is_met = abs(predictions[key] / item.seconds - 1.0) <= AIM
        if not is_met and key not in moves:
            moves[key] = elasticities(setup, quantity)
        rows.append(
            Row(
                measurement=item,
                predicted=predictions[key],
                roofline=_roofline(setup, quantity),
                interval=bounds.get(key),
                elasticities={} if is_met else moves[key],
                alternatives={} if is_met else _alternatives(item),
            )
        )
    return rows


def _roofline(setup: AnySetup, quantity: Quantity) -> float | None:
    return predict(setup, quantity, rate=math.inf) if runs_deepspeed_step(setup) else None


def _alternatives(item: Measurement) -> dict[str, float]:
    found = {}
    for other in item.alternatives:
        setup = other.setup or item.setup
        profile = hardware_of(setup).with_values(other.values)
        rate = None if other.step_bytes is None else deepspeed_rate(other.step_bytes)
        found[other.text] = predict(setup, item.quantity, profile, rate)
    return found


def table(rows: Sequence[Row]) -> str:
    """Return all rows by group, in milliseconds, and how many are met."""
    width = max(len(row.measurement.label) for row in rows) + 2
    head = f"  {'':<{width}}{'measured':>9}{'predicted':>10}{'error':>8}{'80 % interval':>17}"
    lines = []
    for group, (title, _) in GROUPS.items():
        chosen = [row for row in rows if row.measurement.group == group]
        if chosen:
            lines += [title, head + f"{'roofline':>10}", *(_line(row, width) for row in chosen)]
    met = sum(abs(row.error) <= AIM for row in rows)
    return "\n".join([*lines, f"{met} of {len(rows)} within {AIM:.0%}"])


def _line(row: Row, width: int) -> str:
    line = f"  {row.measurement.label:<{width}}{row.measurement.seconds * 1e3:>9.0f}"
    line += f"{row.predicted * 1e3:>10.0f}{row.error:>+8.1%}{_span(row.interval):>17}"
    return line + ("" if row.roofline is None else f"{row.roofline * 1e3:>10.0f}")


def _span(bounds: tuple[float, float] | None) -> str:
    return "-" if bounds is None else f"{bounds[0] * 1e3:.0f} to {bounds[1] * 1e3:.0f}"


def record_of(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the rows with the constant behind them, JSON-ready."""
    return {
        "format": FORMAT,
        "deepspeed_bytes_per_second": deepspeed_rate(),
        "deepspeed_bytes_per_parameter": step_bytes(),
        "rows": [row.to_dict() for row in rows],
    }


@click.command()
@click.option("--out", type=click.Path(path_type=Path), help="Where the record goes.")
@click.option("--draws", default=_DRAWS, show_default=True, help="For intervals; 0 is none.")
def main(out: Path | None, draws: int) -> None:
    """Predict all published measurements and write the record."""
    folder = out or results_folder("published")
    rows = predict_all(draws=draws)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / TABLE, table(rows) + "\n")
    write_json(folder / RECORD, {**record_of(rows), **provenance()})
    click.echo(table(rows))


if __name__ == "__main__":
    main()
