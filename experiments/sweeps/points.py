"""Points: the row of every point, by formula where one holds and else by events.

A formula answers many machines at once: points that differ in rates only are solved together.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from experiments.sweeps.grid import Case, Sweep
from sim.closed_forms.steady import ClosedForm, has_closed_form
from sim.machine import Rates
from sim.memory.need import memory_of
from sim.simulate import Strategy, simulate
from sim.timing.costs import costs_of
from zenflow.errors import ConfigError

Row = dict[str, Any]

OK, NO_ROOM, INVALID, NO_FORMULA, FAILED = (
    "ok", "does not fit", "invalid", "no formula", "failed",
)  # fmt: skip
"""A point's status: predicted; too little memory; values that don't go together; `closed-form`
was asked for and does not hold; its worker died."""
FORMULA, EVENTS = "closed form", "simulated"

RESULTS: Mapping[str, str] = {
    "status": "ok, does not fit, invalid, no formula or failed; only ok rows have times",
    "reason": "why there is no prediction",
    "method": "closed form or simulated",
    "step_seconds": "mean steady-state step",
    "stall_seconds": "of it the device waits",
    "stall_share": "stall_seconds / step_seconds",
    "selection_seconds": "part of both: selections of columns, spread over all steps",
    "tokens_per_second": "over all devices",
    "d2h_bytes": "to the host in a step, one device; empty with a closed form",
    "h2d_bytes": "to the device in a step, one device; empty with a closed form",
    "device_bytes": "memory of one device at its fullest",
    "host_bytes": "memory of one host for its devices",
    "staleness_steps": "largest age of a gradient when it lands; empty for other systems",
    "num_params": "of the model",
    "num_devices": "that train together",
    "device_name": "of the machine",
    "host_name": "of the machine",
    "link_name": "of the machine",
}
"""Columns of a table behind its axes; seconds and bytes."""

_RATES = ("d2h", "h2d", "duplex", "dram", "host", "steps")
"""Axes of a closed form in which machines of one group differ."""
_DIGITS = 12
"""Significant ones: a formula's last digit depends on how many points are solved together."""


def rows_of(sweep: Sweep, indices: Sequence[int]) -> Iterator[tuple[int, Row]]:
    """Yield the row of every point, as they are found: those of formulas come first."""
    open_: list[tuple[int, Case, Row]] = []
    for index in indices:
        try:
            case = sweep.case(index)
            row = _facts(case)
            short = _shortfalls(case, row)
        except ConfigError as error:
            yield index, {"status": INVALID, "reason": _in_one_line(error)}
            continue
        if short:
            yield index, {**row, "status": NO_ROOM, "reason": short}
        else:
            open_.append((index, case, row))
    solved = _by_formula({index: case for index, case, _ in open_}, sweep)
    # Those of formulas come first, as they take no time.
    for index, case, row in sorted(open_, key=lambda point: point[0] not in solved):
        try:
            found = solved[index] if index in solved else _by_events(case)
        except ConfigError as error:
            found = {"status": INVALID, "reason": _in_one_line(error)}
        yield index, {**row, **found}


def _in_one_line(error: ConfigError) -> str:
    return " ".join(str(error).split())


def _facts(case: Case) -> Row:
    config = case.strategy.config
    hardware = case.hardware
    lands = None
    if config is not None:
        lands = 0 if config.topk_ratio == 1 else config.effective_lag() + config.update_interval
    return {
        "staleness_steps": lands,
        "num_params": case.workload.num_params,
        "num_devices": hardware.total_devices,
        "device_name": hardware.device.name,
        "host_name": hardware.host.name,
        "link_name": hardware.link.name,
    }


def _shortfalls(case: Case, row: Row) -> str:
    """Return why a point doesn't fit, empty if it does; its memory goes into the row."""
    need = memory_of(case.workload, case.strategy, case.hardware)
    row["device_bytes"], row["host_bytes"] = _rounded(need.device_bytes), _rounded(need.host_bytes)
    return "; ".join(
        f"{short.place} memory: needs {short.needed / 2**30:.1f} GiB, has "
        f"{short.available / 2**30:.1f} GiB"
        for short in need.fits(case.hardware)
    )


# ---- by formula -------------------------------------------------------------------------------


def _by_formula(cases: Mapping[int, Case], sweep: Sweep) -> dict[int, Row]:
    """Return what formulas say of points, by index; those that are missing are to be simulated."""
    found: dict[int, Row] = {}
    groups: dict[str, list[int]] = defaultdict(list)
    for index, case in cases.items():
        if _has_formula(case, sweep):
            groups[_group(case)].append(index)
    for members in groups.values():
        solved = _solved([cases[index] for index in members], sweep.tolerance)
        found |= {index: row for index, row in zip(members, solved, strict=True) if row}
    if sweep.method == "closed-form":
        tried = {index for members in groups.values() for index in members}
        for index, case in cases.items():
            missing = {"status": NO_FORMULA, "reason": _why_not(case, index in tried)}
            found.setdefault(index, missing)
    return found


def _has_formula(case: Case, sweep: Sweep) -> bool:
    """Whether a formula may be tried: it knows nothing of selections that recur."""
    if sweep.method == "simulate" or _selects(case.strategy):
        return False
    return has_closed_form(costs_of(case.workload, case.hardware), case.strategy)


def _selects(strategy: Strategy) -> bool:
    config = strategy.config
    return config is not None and 0 < config.topk_ratio < 1 and config.select_interval_steps > 0


def _why_not(case: Case, was_tried: bool) -> str:
    if was_tried:
        return "lanes slow one another down, or the host does not keep up: simulate it"
    if _selects(case.strategy):
        return "no formula with selections that recur: give --select-interval 0, or simulate it"
    return f"{case.strategy.name} has no closed form here: simulate it"


def _group(case: Case) -> str:
    """Return what machines that one formula answers have in common."""
    hardware = case.hardware
    # How many gradients wait on the host follows from its memory.
    depth = memory_of(case.workload, case.strategy, hardware).queue_depth
    same = (
        id(case.workload), case.strategy, depth, hardware.device, hardware.overheads,
        hardware.link.latency, hardware.dram_sharers, hardware.total_devices,
    )  # fmt: skip
    return repr(same)


def _solved(cases: Sequence[Case], tolerance: float) -> Iterator[Row | None]:
    """Yield what one formula says of each case; None where it does not hold."""
    import numpy as np

    first = cases[0]
    rates = [Rates.of(case.hardware) for case in cases]
    axes = {name: np.array([getattr(rate, name) for rate in rates]) for name in _RATES}
    form = ClosedForm(costs_of(first.workload, first.hardware), first.strategy)
    steady = form.solve(tolerance=tolerance, **axes)
    for case, step, stall, holds in zip(
        cases, steady.step_seconds, steady.stall_seconds, steady.applies, strict=True
    ):
        yield _times(case, FORMULA, float(step), float(stall), 0.0) if holds else None


# ---- by events --------------------------------------------------------------------------------


def _by_events(case: Case) -> Row:
    found = simulate(costs_of(case.workload, case.hardware), case.strategy, keeps_spans=False)
    row = _times(case, EVENTS, found.step_seconds, found.stall_seconds, found.selection_seconds)
    return {**row, "d2h_bytes": _rounded(found.d2h_bytes), "h2d_bytes": _rounded(found.h2d_bytes)}


def _times(case: Case, method: str, step: float, stall: float, selection: float) -> Row:
    tokens = case.workload.tokens_per_step * case.hardware.total_devices
    return {
        "status": OK,
        "method": method,
        "step_seconds": _rounded(step),
        "stall_seconds": _rounded(stall),
        "stall_share": _rounded(stall / step),
        "selection_seconds": _rounded(selection),
        "tokens_per_second": _rounded(tokens / step),
    }


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else value
