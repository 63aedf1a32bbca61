"""Published measurements of others' machines beside their predictions."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from evidence.published.runs import Group, published
from evidence.studies.published.memory import about, memory_table, predict_memory
from experiments.lab.columns import Column, Table, key
from experiments.lab.drawing import panels
from experiments.lab.finding import Finding, Tolerance
from experiments.lab.study import Data, Job, computed
from experiments.paper.predictions import (
    at_roofline,
    elasticities,
    hardware_of,
    intervals,
    predict,
    regime_of,
    runs_deepspeed_step,
    step_bytes,
)
from experiments.paper.setups import AnySetup, Measurement, Quantity
from sim.fitting.left_out import Outcome, fit_left_out, fit_sides, held_out
from sim.hardware.components import DEEPSPEED_SHARE

AIM = 0.15
"""Absolute error within which a prediction counts as met."""
_DRAWS = 60


def predict_all(
    measurements: Sequence[Measurement] | None = None,
    *,
    draws: int = _DRAWS,
    explains: bool = True,
) -> list[dict[str, Any]]:
    """Return measurements beside their predictions, JSON-ready; 0 draws are no intervals.

    Without measurements these are all published ones.

    ``figures_seconds`` holds 0.8 of the predictions with figures drawn by their uncertainty,
    ``interval_seconds`` of those with what the model leaves out as well.
    ``roofline_seconds`` is as if DeepSpeed's CPU step reached the DRAM bandwidth, None without
    one. Of missed rows ``elasticities`` has per cent of the prediction for one per cent of a
    figure, ``alternatives`` predictions with other values of what is unknown; both are empty
    where nothing is to be explained.
    """
    # Several measurements are of one set-up.
    predictions: dict[str, float] = {}
    bounds: dict[str, list[list[float]]] = {}
    moves: dict[str, Mapping[str, float]] = {}
    rows = []
    for item in published().measurements if measurements is None else measurements:
        setup, quantity = item.setup, item.quantity
        case = f"{setup} {quantity}"
        if case not in predictions:
            predictions[case] = predict(setup, quantity)
            if draws:
                found = intervals(setup, quantity, draws)
                bounds[case] = [[each.low, each.high] for each in found]
        error = predictions[case] / item.seconds - 1.0
        is_explained = explains and abs(error) > AIM
        if is_explained and case not in moves:
            moves[case] = elasticities(setup, quantity)
        rows.append(
            {
                "group": item.group,
                "label": item.label,
                "quantity": quantity,
                "measured_seconds": item.seconds,
                "predicted_seconds": predictions[case],
                "error": error,
                "regime": regime_of(setup),
                "figures_seconds": bounds[case][0] if draws else None,
                "interval_seconds": bounds[case][1] if draws else None,
                "roofline_seconds": _roofline(setup, quantity),
                "elasticities": moves[case] if is_explained else {},
                "alternatives": _alternatives(item) if is_explained else {},
                "source": item.source,
                "assumption": item.assumption,
            }
        )
    return rows


def _roofline(setup: AnySetup, quantity: Quantity) -> float | None:
    if not runs_deepspeed_step(setup):
        return None
    return predict(setup, quantity, at_roofline(hardware_of(setup)))


def _alternatives(item: Measurement) -> dict[str, float]:
    found = {}
    for other in item.alternatives:
        setup = other.setup or item.setup
        profile = hardware_of(setup).with_values(other.values)
        found[other.text] = predict(setup, item.quantity, profile)
    return found


def record_of(rows: Sequence[Mapping[str, Any]]) -> Data:
    """Return the rows with the figure behind DeepSpeed's, JSON-ready."""
    return {
        "deepspeed_share": DEEPSPEED_SHARE.value,
        "deepspeed_bytes_per_parameter": step_bytes(),
        "left_out": coverage_of(rows) if rows[0]["figures_seconds"] else None,
        "memory": predict_memory(),
        "rows": rows,
    }


def coverage_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the term for what the model leaves out, and how many measurements ranges hold.

    Rows whose phases are given are not counted, nor are those of modules that the simulator does
    not have: these say nothing about runs of modules that it has. ``terms`` are of each regime's
    rows, where groups count alike, and ``sigma`` is one spread for all. ``held`` has for each
    group its measurements, and those in ranges of figures alone and of the term that the regime's
    other groups give. ``regimes`` has the sums of these by regime.
    """
    counted = [
        row for row in rows if row["group"] != "phases" and "modules" not in _group(row).open
    ]
    held: dict[str, Counter[str]] = defaultdict(Counter)
    regimes: dict[str, Counter[str]] = defaultdict(Counter)
    terms = {}
    for regime in dict.fromkeys(row["regime"] for row in counted):
        own = [row for row in counted if row["regime"] == regime]
        groups = list(dict.fromkeys(row["group"] for row in own))
        parts = [[_outcome(row) for row in own if row["group"] == group] for group in groups]
        terms[regime] = asdict(fit_sides(parts))
        for group, part, others in zip(groups, parts, held_out(parts), strict=True):
            found = {
                "rows": len(part),
                "figures": sum(not outcome.needed for outcome in part),
                "without_the_group": others,
            }
            held[group].update(found)
            regimes[regime].update(found)
    sigma = fit_left_out([_outcome(row) for row in counted])
    ordered = {group: dict(held[group]) for group in dict.fromkeys(r["group"] for r in counted)}
    sums = {regime: dict(counts) for regime, counts in regimes.items()}
    return {"sigma": sigma, "terms": terms, "held": ordered, "regimes": sums}


def _outcome(row: Mapping[str, Any]) -> Outcome:
    low, high = row["figures_seconds"]
    return Outcome(measured=row["measured_seconds"], low=low, high=high)


def errors_by_regime(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return absolute errors: of each regime, of all but given phases, and of parts of these.

    Parts are rows entered blind, those of them that were entered last, and rows whose sources
    state all that a prediction needs, by regime as well: without and with the groups that were
    found to leave something open when their errors had been seen.
    """
    regimes = list(dict.fromkeys(row["regime"] for row in rows))
    chosen = {name: [row for row in rows if row["regime"] == name] for name in regimes}
    counted = [row for row in rows if row["regime"] != regimes[0]]
    stated = [row for row in counted if not _group(row).open]
    late = [row for row in counted if _group(row).listed_late]
    chosen["all but the first"] = counted
    chosen["of these, entered blind"] = _blind(counted)
    chosen["of these, entered last"] = _entered("last", counted)
    chosen["of these, entered third"] = _entered("third", counted)
    chosen["of these, entered fourth"] = _entered("fourth", counted)
    chosen["of these, entered fifth"] = _entered("fifth", counted)
    chosen["of these, entered sixth"] = _entered("sixth", counted)
    chosen["all stated"] = stated
    for name in regimes[1:]:
        chosen[f"all stated, {name}"] = [row for row in stated if row["regime"] == name]
    chosen["all stated and entered blind"] = _blind(stated)
    chosen["the same with groups listed late"] = _blind([*stated, *late])
    chosen["all stated and entered last"] = _entered("last", stated)
    found = []
    for name, own in chosen.items():
        if not own:
            continue
        errors = [abs(row["error"]) for row in own]
        found.append(
            {
                "regime": name,
                "rows": len(errors),
                "median": float(np.quantile(errors, 0.5)),
                "p90": float(np.quantile(errors, 0.9)),
                "within": sum(error <= AIM for error in errors),
            }
        )
    return found


def _group(row: Mapping[str, Any]) -> Group:
    return published().groups[row["group"]]


def _blind(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [row for row in rows if _group(row).is_blind]


def _entered(when: str, rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [row for row in rows if _group(row).entered == when]


REGIMES = (
    key("regime"),
    key("rows"),
    key("median", ".1%"),
    Column(head="90th percentile", show=lambda row: f"{row['p90']:.1%}"),
    Column(head=f"within {AIM:.0%}", show=lambda row: f"{row['within']} of {row['rows']}"),
)
"""Columns of a table of a regime's absolute errors."""


def _make(job: Job) -> Data:
    if job.smoke:
        return record_of(predict_all(published().measurements[:6], draws=0))
    return record_of(predict_all())


def _findings(data: Data) -> Sequence[Finding]:
    return [
        Finding(
            claim=f"{_group(row).title}: {row['label']}, {row['quantity']}",
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
        f"{len(data['rows'])} within {AIM:.0%}. {about(data['memory'])}"
    )


def _tables(data: Data) -> Sequence[Table]:
    groups = [
        Table(title=group.title, columns=COLUMNS, rows=chosen)
        for name, group in published().groups.items()
        if (chosen := [row for row in data["rows"] if row["group"] == name])
    ]
    regimes = Table(
        title="Absolute errors by regime", columns=REGIMES, rows=errors_by_regime(data["rows"])
    )
    return [regimes, *groups, memory_table(data["memory"])]


COLUMNS = (
    key("label", head="set-up"),
    Column(head="measured", show=lambda row: milliseconds(row["measured_seconds"])),
    Column(head="predicted", show=lambda row: milliseconds(row["predicted_seconds"])),
    key("error", "+.1%"),
    Column(head="range", show=lambda row: _span(row["interval_seconds"])),
    Column(head="roofline", show=lambda row: milliseconds(row["roofline_seconds"])),
)
"""Columns of a table of measurements, times in milliseconds."""


def milliseconds(seconds: float | None) -> str:
    """Return seconds as text in milliseconds; nothing of none."""
    return "" if seconds is None else f"{seconds * 1e3:.0f}"


def _span(bounds: Sequence[float] | None) -> str:
    """Return a range as text in milliseconds."""
    return "-" if bounds is None else " to ".join(map(milliseconds, bounds))


def _draw(data: Data) -> Figure:
    figure, (axes,) = panels(6.4, 5.4)
    for number, regime in enumerate(dict.fromkeys(row["regime"] for row in data["rows"])):
        own = [row for row in data["rows"] if row["regime"] == regime]
        for is_open, fill in ((True, "none"), (False, f"C{number}")):
            some = [row for row in own if bool(_group(row).open) == is_open]
            axes.plot([row["measured_seconds"] for row in some],
                      [row["predicted_seconds"] for row in some],
                      "o", markersize=5, alpha=0.8, color=f"C{number}", markerfacecolor=fill,
                      label=None if is_open else regime)  # fmt: skip
    measured = [row["measured_seconds"] for row in data["rows"]]
    ends = [min(measured) / 1.5, max(measured) * 1.5]
    axes.plot(ends, ends, color="#555555", linewidth=1)
    axes.fill_between(ends, [end * (1 - AIM) for end in ends], [end * (1 + AIM) for end in ends],
                      color="#555555", alpha=0.12, linewidth=0)  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("measured by others, s")
    axes.set_ylabel("predicted, s")
    axes.set_title(
        f"published measurements (band: {AIM:.0%}); rings: the source leaves something open",
        fontsize=10,
    )
    axes.legend(fontsize=8, frameon=False)
    return figure


STUDY = computed(
    name="published",
    title="Published measurements beside their predictions",
    make=_make,
    findings=_findings,
    about=_about,
    tables=_tables,
    draw=_draw,
    page="docs/validation.md",
    minutes=1,
    exact=True,
    # A quantile of draws, and a small difference of large numbers, move with the last digits.
    unchecked=frozenset({"figures_seconds", "interval_seconds", "left_out", "error"}),
)
