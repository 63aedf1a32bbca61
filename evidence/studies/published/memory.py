"""Published fits, failures and peaks of device memory beside their predictions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from evidence.published.memory import memory_cases
from experiments.lab.columns import Column, Table, key
from experiments.paper.predictions import hardware_of, workload_of
from experiments.paper.setups import MemoryCase
from sim.memory.chance import MemoryOutcome, chance_to_fit, fit_spread
from sim.memory.need import MemoryNeed, memory_of
from sim.simulate import Strategy

FITS_AT = 0.95
"""Chance from which a set-up is said to fit."""
_LESS_SURE = 0.9


def verdict_of(row: Mapping[str, Any]) -> str:
    """Return the prediction of a case: fits, may fit, or does not fit."""
    if row["need_bytes"] > row["device_bytes"]:
        return "does not fit"
    return "fits" if row["chance"] >= FITS_AT else "may fit"


def _said(row: Mapping[str, Any]) -> str:
    """Return the verdict, and whether it is wrong."""
    verdict = verdict_of(row)
    if row["ran"]:
        return "**false refusal**" if verdict == "does not fit" else verdict
    return "**false fit**" if verdict == "fits" else verdict


def predict_memory(cases: Sequence[MemoryCase] | None = None) -> list[dict[str, Any]]:
    """Return cases beside their predictions, JSON-ready; without any these are all published ones.

    ``predicted_bytes`` is of the same scope as the published peak, ``need_bytes`` of the whole
    device. ``chance`` is of fitting, with the spread that all other cases give.
    """
    rows = [_predict(case) for case in (memory_cases() if cases is None else cases)]
    outcomes = [outcome_of(row) for row in rows]
    for index, row in enumerate(rows):
        spread = fit_spread([*outcomes[:index], *outcomes[index + 1 :]])
        row["chance"] = chance_to_fit(row["need_bytes"], row["device_bytes"], spread)
    return rows


def _predict(case: MemoryCase) -> dict[str, Any]:
    setup, hardware = case.setup, hardware_of(case.setup)
    strategy = Strategy.of(setup.strategy, **setup.options)
    need = memory_of(workload_of(setup), strategy, hardware)
    predicted = _in_scope(need, case)
    return {
        "label": case.label,
        "ran": case.fits,
        "peak_bytes": case.peak,
        "scope": case.scope if case.peak else "device",
        "predicted_bytes": predicted,
        "error": predicted / case.peak - 1.0 if case.peak else None,
        "need_bytes": need.device_bytes,
        "device_bytes": hardware.device.memory.value,
        "source": case.source,
        "assumption": case.assumption,
    }


def outcome_of(row: Mapping[str, Any]) -> MemoryOutcome:
    """Return a row's evidence on the spread of predicted memory."""
    return MemoryOutcome(
        predicted=row["predicted_bytes"],
        room=row["device_bytes"],
        ran=row["ran"],
        peak=row["peak_bytes"],
    )


def _in_scope(need: MemoryNeed, case: MemoryCase) -> float:
    if case.peak is None:
        return need.device_bytes
    if case.scope == "device":
        return need.device_bytes + need.cached_bytes
    return need.allocated_bytes if case.scope == "allocated" else need.reserved_bytes


def counts_of(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[bool, str], int]:
    """Return the number of cases by whether they ran and what is predicted."""
    return Counter((row["ran"], verdict_of(row)) for row in rows)


def about(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return in words how many verdicts are wrong."""
    found = counts_of(rows)
    failed, ran = (sum(row["ran"] is so for row in rows) for so in (False, True))
    spread = fit_spread(outcome_of(row) for row in rows)
    return (
        "Peaks and outcomes are likeliest with a log-normal factor on what is predicted, of a "
        f"spread of {spread:.2f}. A set-up is said to fit where its chance is at least "
        f"{FITS_AT:.0%} with the spread of all others. Of {failed} that ran out of device memory "
        f"{found[False, 'fits']} are said to fit (at {_LESS_SURE:.0%} it would be "
        f"{sum(not row['ran'] and row['chance'] >= _LESS_SURE for row in rows)}), "
        f"{found[False, 'may fit']} that they may, and "
        f"{found[False, 'does not fit']} that they do not. Of {ran} that ran the numbers are "
        f"{found[True, 'fits']}, {found[True, 'may fit']} and {found[True, 'does not fit']}."
    )


def _gigabytes(number: float | None) -> str:
    return "" if number is None else f"{number / 1e9:.1f}"


MEMORY_COLUMNS = (
    key("label", head="set-up"),
    Column(head="ran", show=lambda row: "yes" if row["ran"] else "no"),
    Column(head="peak", show=lambda row: _gigabytes(row["peak_bytes"])),
    key("scope", head="of"),
    Column(head="predicted", show=lambda row: _gigabytes(row["predicted_bytes"])),
    Column(head="error", show=lambda row: "" if row["error"] is None else f"{row['error']:+.1%}"),
    Column(head="device", show=lambda row: _gigabytes(row["device_bytes"])),
    Column(head="chance", show=lambda row: f"{row['chance']:.0%}"),
    Column(head="verdict", show=_said),
)
"""Columns of a table of cases, bytes in GB."""


def memory_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the cases as a table."""
    return Table(title="Memory", columns=MEMORY_COLUMNS, rows=rows)
