"""Points: the results of every point.

Points that differ in rates alone share everything that rates don't change (blocks, windows,
memory, costs), and are predicted together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.sweeps.columns import INVALID, NO_ROOM, OK, Batch, Row, rounded
from experiments.sweeps.grid import Case, Sweep
from experiments.sweeps.rates import Group, groups_of, machines_of
from experiments.sweeps.shared import Shared
from sim.memory.need import MemoryNeed
from sim.replay.tape import CannotRecordError
from sim.simulate import Prediction
from sim.steady import SteadyStates, steady, steady_many
from sim.timing.costs import StepCosts, costs_of
from zenflow.errors import ConfigError

_PATIENCE = 0.1
"""Seconds for which rows are collected before they are handed on."""

_AT_ONCE = 256
"""Points that are predicted before they are handed on."""

Array = NDArray[np.float64]
Places = NDArray[np.int64]
Mask = NDArray[np.bool_]


def rows_of(sweep: Sweep, points: Sequence[int]) -> Iterator[tuple[int, Row]]:
    """Yield the row of every point."""
    for batch in batches_of(sweep, points):
        yield from batch.rows()


def batches_of(sweep: Sweep, points: Sequence[int]) -> Iterator[Batch]:
    """Yield the results of every point as they are found."""
    shared = Shared(sweep)
    for group in groups_of(sweep, np.asarray(points, dtype=np.int64)):
        yield from _answered(sweep, group, shared)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Base:
    """Facts that all points of a group have in common, by one of them."""

    case: Case
    costs: StepCosts
    facts: Row
    """Results that rates don't change: memory, names, and why it does not fit if it doesn't."""


def _base(sweep: Sweep, point: int, shared: Shared) -> _Base:
    """Return the facts that a point shares with its group.

    Raises:
        ConfigError: Its values don't go together.
    """
    case = sweep.case(point)
    costs = shared.costs(point, case)
    return _Base(case=case, costs=costs, facts=_facts(case, shared.memory(point, case)))


def _answered(sweep: Sweep, group: Group, shared: Shared) -> Iterator[Batch]:
    """Yield the results of a group."""
    base: _Base | None = None
    for place, point in enumerate(group.points.tolist()):
        try:
            base = _base(sweep, point, shared)
        except ConfigError as error:  # perhaps of its rates: those of others may do
            yield Batch.of([point], {"status": INVALID, "reason": _in_one_line(error)})
            continue
        group = group.of(np.arange(place, len(group.points)))
        break
    if base is None:
        return
    if not _shares(base):
        yield from _one_by_one(group.points, lambda point: _by_itself(sweep, point, shared))
        return
    rates, times, known = machines_of(sweep, base.case, base.costs, group)
    if base.facts["status"] == NO_ROOM:
        yield Batch.of(group.points[known], base.facts)
    else:
        yield from _together(sweep, base, group.points, rates, times, known)
    yield from _one_by_one(group.points[~known], lambda point: _by_itself(sweep, point, shared))


def _shares(base: _Base) -> bool:
    """Whether rates change neither memory nor what is simulated: not on a CPU as the device.

    Other systems' memory follows from how fast the machine is.
    """
    return base.case.strategy.config is not None and not base.case.hardware.device.is_cpu


def _one_by_one(points: NDArray[np.int64], find: Callable[[int], Row]) -> Iterator[Batch]:
    """Yield points that are answered each by itself, some together where they are quick."""
    rows: dict[int, Row] = {}
    since = time.monotonic()
    for point in points.tolist():
        try:
            rows[point] = find(point)
        except ConfigError as error:
            rows[point] = {"status": INVALID, "reason": _in_one_line(error)}
        if time.monotonic() - since > _PATIENCE:
            yield Batch.of_rows(rows)
            rows, since = {}, time.monotonic()
    if rows:
        yield Batch.of_rows(rows)


def _in_one_line(error: ConfigError) -> str:
    return " ".join(str(error).split())


def _by_itself(sweep: Sweep, point: int, shared: Shared) -> Row:
    """Return the row of a point that shares nothing.

    Raises:
        ConfigError: Its values don't go together.
    """
    base = _base(sweep, point, shared)
    if base.facts["status"] == NO_ROOM:
        return base.facts
    return _predicted(base.case, base.facts)


def _facts(case: Case, need: MemoryNeed) -> Row:
    """Return the facts of a point that are known without simulating it."""
    config, hardware = case.strategy.config, case.hardware
    lands = None
    if config is not None:
        lands = 0 if config.topk_ratio == 1 else config.effective_lag() + config.update_interval
    short = "; ".join(
        f"{place} memory: needs {needed / 2**30:.1f} GiB, has {available / 2**30:.1f} GiB"
        for place, (needed, available) in need.short_of(hardware).items()
    )
    return {
        "status": NO_ROOM if short else OK,
        "reason": short,
        "device_bytes": rounded(need.device_bytes).item(),
        "host_bytes": rounded(need.host_bytes).item(),
        "staleness_steps": lands,
        "num_params": case.workload.num_params,
        "num_devices": hardware.total_devices,
        "num_hosts": hardware.num_hosts,
        "device_name": hardware.device.name,
        "host_name": hardware.host.name,
        "link_name": hardware.link.name,
    }


# ---- steady steps -----------------------------------------------------------------------------


def _together(
    sweep: Sweep, base: _Base, points: Places, rates: Array, times: Array, known: Mask
) -> Iterator[Batch]:
    """Yield the points of a group that make sense, many at a time if their schedule allows."""
    (places,) = np.nonzero(known)
    for at in range(0, len(places), _AT_ONCE):
        own = places[at : at + _AT_ONCE]
        try:
            found = steady_many(
                base.costs, base.case.strategy, rates[own], times[own] if len(times) > 1 else times
            )
        except CannotRecordError:
            yield from _one_by_one(
                points[places[at:]], lambda point: _predicted(sweep.case(point), base.facts)
            )
            return
        yield Batch.of(points[own], {**base.facts, **_columns(base.case, found)})


def _predicted(case: Case, facts: Row) -> Row:
    found = steady(costs_of(case.workload, case.hardware), case.strategy)
    columns = {name: column.item() for name, column in _columns(case, found).items()}
    return {**facts, **columns}


def _columns(case: Case, found: Prediction | SteadyStates) -> dict[str, Array]:
    """Return the columns of what was found; each of its numbers may be an array."""
    tokens = case.workload.tokens_per_step * case.hardware.total_devices
    columns: dict[str, Any] = {
        "step_seconds": found.step_seconds,
        "stall_seconds": found.stall_seconds,
        "stall_share": found.stall_seconds / found.step_seconds,
        "selection_seconds": found.selection_seconds,
        "tokens_per_second": tokens / found.step_seconds,
        "d2h_bytes": found.d2h_bytes,
        "h2d_bytes": found.h2d_bytes,
    }
    values = rounded(np.stack([np.atleast_1d(value) for value in columns.values()]))
    return dict(zip(columns, values, strict=True))
