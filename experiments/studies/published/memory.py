"""Published fits, failures and peaks of device memory beside their predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.lab.columns import Column, Table, key
from experiments.literature.memory_cases import MEMORY_CASES
from experiments.literature.setups import MemoryCase
from experiments.studies.published.predictions import hardware_of, workload_of
from sim.memory.need import MemoryNeed, memory_of
from sim.planning.options import default_reserve
from sim.simulate import Strategy

_VERDICTS = {
    (True, True): "fits",
    (False, False): "does not fit",
    (False, True): "**false fit**",
    (True, False): "**false refusal**",
}
"""What is said of a case, by whether it ran and whether it is predicted to fit."""


def _verdict(row: Mapping[str, Any]) -> str:
    """Return what is said of a case: one that fits but leaves no reserve is tight."""
    return "tight" if row.get("is_tight") else _VERDICTS[row["ran"], row["fits"]]


def predict_memory(cases: Sequence[MemoryCase] = MEMORY_CASES) -> list[dict[str, Any]]:
    """Return every case beside its prediction, JSON-ready.

    ``predicted_bytes`` is of the same scope as the published peak; the whole need where only the
    fit is published.
    """
    rows = []
    for case in cases:
        setup, hardware = case.setup, hardware_of(case.setup)
        strategy = Strategy.of(setup.strategy, **setup.options)
        need = memory_of(workload_of(setup), strategy, hardware)
        predicted, reserve = _in_scope(need, case), default_reserve(hardware)
        fits = "device" not in need.short_of(hardware)
        rows.append(
            {
                "label": case.label,
                "ran": case.fits,
                "peak_bytes": case.peak,
                "scope": case.scope if case.peak else "device",
                "predicted_bytes": predicted,
                "error": predicted / case.peak - 1.0 if case.peak else None,
                "device_bytes": hardware.device.memory.value,
                "fits": fits,
                "is_tight": fits and "device" in need.short_of(hardware, reserve),
                "source": case.source,
                "assumption": case.assumption,
            }
        )
    return rows


def _in_scope(need: MemoryNeed, case: MemoryCase) -> float:
    if case.peak is None or case.scope == "device":
        return need.device_bytes
    return need.allocated_bytes if case.scope == "allocated" else need.reserved_bytes


def counts_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the numbers of cases that ran, that failed, false fits, tight ones, false refusals.

    A failure that is predicted to be tight is no false fit: a plan does not choose it.
    """
    tight = [bool(row.get("is_tight")) for row in rows]
    return {
        "ran": sum(row["ran"] for row in rows),
        "failed": sum(not row["ran"] for row in rows),
        "false_fits": sum(
            row["fits"] and not row["ran"] and not is_tight
            for row, is_tight in zip(rows, tight, strict=True)
        ),
        "tight": sum(tight),
        "false_refusals": sum(row["ran"] and not row["fits"] for row in rows),
    }


def about(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return in words how many verdicts are wrong."""
    found = counts_of(rows)
    return (
        f"Of {found['failed']} set-ups that ran out of device memory {found['false_fits']} are "
        f"predicted to fit, and of {found['ran']} that ran {found['false_refusals']} are "
        f"predicted not to. {found['tight']} are predicted to fit, but not to leave a plan's "
        "reserve."
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
    Column(head="verdict", show=_verdict),
)
"""What a table says of a case, bytes in GB."""


def memory_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the cases as a table."""
    return Table(title="Memory", columns=MEMORY_COLUMNS, rows=rows)
