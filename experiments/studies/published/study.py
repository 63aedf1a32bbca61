"""Published measurements of others' machines beside their predictions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from experiments.lab.columns import Column, Table, key
from experiments.lab.finding import Finding, Tolerance
from experiments.lab.study import Data, Job, computed
from experiments.literature.measurements import GROUPS, MEASUREMENTS
from experiments.literature.setups import AnySetup, Measurement, Quantity
from experiments.studies.published.predictions import (
    deepspeed_rate,
    elasticities,
    hardware_of,
    interval,
    predict,
    runs_deepspeed_step,
    step_bytes,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AIM = 0.15
"""Absolute error within which a prediction counts as met."""
_DRAWS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A measurement beside its prediction, seconds."""

    measurement: Measurement
    predicted: float
    roofline: float | None
    """Seconds as if DeepSpeed's CPU step reached the DRAM bandwidth; None without one."""
    interval: tuple[float, float] | None
    """Range that holds 0.8 of the predictions with figures drawn by their uncertainty."""
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


def record_of(rows: Sequence[Row]) -> Data:
    """Return the rows with the constant behind them, JSON-ready."""
    return {
        "deepspeed_bytes_per_second": deepspeed_rate(),
        "deepspeed_bytes_per_parameter": step_bytes(),
        "rows": [row.to_dict() for row in rows],
    }


def _make(job: Job) -> Data:
    if job.smoke:
        return record_of(predict_all(MEASUREMENTS[:6], draws=0))
    return record_of(predict_all())


def _findings(data: Data) -> Sequence[Finding]:
    return [
        Finding(
            claim=f"{GROUPS[row['group']][0]}: {row['label']}, {row['quantity']}",
            source=row["source"],
            unit="s",
            published=row["measured_seconds"],
            simulated=row["predicted_seconds"],
            tolerance=Tolerance.relative(AIM),
            note=row["assumption"],
        )
        for row in data["rows"]
    ]


def _about(data: Data) -> str:
    met = sum(abs(row["error"]) <= AIM for row in data["rows"])
    return (
        f"Others' measurements beside predictions that nothing is fitted for: {met} of "
        f"{len(data['rows'])} within {AIM:.0%}. Times below are in milliseconds; the range holds "
        "80 % of the predictions with figures drawn by their uncertainty; roofline is what the "
        "table's DRAM bandwidth would have said of DeepSpeed's CPU step."
    )


def _tables(data: Data) -> Sequence[Table]:
    columns = [
        key("label", head="set-up"),
        Column(head="measured", show=lambda row: milliseconds(row["measured_seconds"])),
        Column(head="predicted", show=lambda row: milliseconds(row["predicted_seconds"])),
        key("error", "+.1%"),
        Column(head="range", show=lambda row: span(row["interval_seconds"])),
        Column(head="roofline", show=lambda row: milliseconds(row["roofline_seconds"])),
    ]
    return [
        Table(title=title, columns=columns, rows=chosen)
        for group, (title, _) in GROUPS.items()
        if (chosen := [row for row in data["rows"] if row["group"] == group])
    ]


def milliseconds(seconds: float | None) -> str:
    """Return seconds as text in milliseconds; nothing of none."""
    return "" if seconds is None else f"{seconds * 1e3:.0f}"


def span(bounds: Sequence[float] | None) -> str:
    """Return a range as text in milliseconds."""
    return "-" if bounds is None else " to ".join(map(milliseconds, bounds))


def _draw(data: Data) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 5.4), layout="constrained")
    axes = figure.subplots()
    for group, (title, _) in GROUPS.items():
        own = [row for row in data["rows"] if row["group"] == group]
        axes.plot([row["measured_seconds"] for row in own],
                  [row["predicted_seconds"] for row in own],
                  "o", markersize=5, alpha=0.8, label=title)  # fmt: skip
    measured = [row["measured_seconds"] for row in data["rows"]]
    ends = [min(measured) / 1.5, max(measured) * 1.5]
    axes.plot(ends, ends, color="#555555", linewidth=1)
    axes.fill_between(ends, [end * (1 - AIM) for end in ends], [end * (1 + AIM) for end in ends],
                      color="#555555", alpha=0.12, linewidth=0)  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("measured by others, s")
    axes.set_ylabel("predicted, s")
    axes.set_title(f"published measurements (band: {AIM:.0%})", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, frameon=False)
    return figure


STUDY = computed(
    name="published",
    title="Published measurements beside their predictions",
    make=_make,
    findings=_findings,
    about=_about,
    tables=_tables,
    draw=_draw,
    minutes=1,
    exact=True,
    # A quantile of draws, and a small difference of large numbers, move with the last digits.
    unchecked=frozenset({"interval_seconds", "error"}),
)
