"""Points: the results of every point, by formula where one holds and else by events.

Points that differ in rates alone share everything that rates don't change (blocks, windows,
memory, costs), and a formula answers all of them at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.sweeps.columns import (
    EVENTS,
    FORMULA,
    INVALID,
    NO_FORMULA,
    NO_ROOM,
    OK,
    Batch,
    Row,
    rounded,
)
from experiments.sweeps.grid import Case, Sweep
from experiments.sweeps.rates import COMPUTE, Group, groups_of, machines_of
from experiments.sweeps.shared import Shared
from sim.closed_forms.steady import ClosedForm, has_closed_form
from sim.machine import Rates
from sim.memory.need import MemoryNeed
from sim.replay.arrays import RATES
from sim.replay.steady import SteadyStates, recording_of
from sim.replay.tape import CannotRecordError, times_of
from sim.simulate import Prediction, selects_every, simulate
from sim.timing.costs import StepCosts, costs_of
from zenflow.errors import ConfigError

_PATIENCE = 0.1
"""Seconds for which rows are collected before they are handed on."""

_REPLAYED = 32
"""Points that are replayed before they are handed on."""

Mask = NDArray[np.bool_]


def rows_of(sweep: Sweep, points: Sequence[int]) -> Iterator[tuple[int, Row]]:
    """Yield the row of every point."""
    for batch in batches_of(sweep, points):
        yield from batch.rows()


def batches_of(sweep: Sweep, points: Sequence[int]) -> Iterator[Batch]:
    """Yield the results of every point as they are found: in each group formulas come first."""
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
    machines, known = machines_of(sweep, base.case, group)
    if base.facts["status"] == NO_ROOM:
        yield Batch.of(group.points[known], base.facts)
    else:
        solved = known & False
        if sweep.method != "simulate" and has_closed_form(base.costs, base.case.strategy):
            times, solved = _by_formula(base, machines, known, sweep.tolerance)
            if solved.any():
                found = {name: values[solved] for name, values in times.items()}
                yield Batch.of(group.points[solved], {**base.facts, "method": FORMULA, **found})
        left = known & ~solved
        if sweep.method == "closed-form":
            missing = {"status": NO_FORMULA, "reason": _why_not(base)}
            yield Batch.of(group.points[left], {**base.facts, **missing})
        else:
            own = {name: values[left] for name, values in machines.items()}
            yield from _by_events(sweep, base, group.of(left), own)
    yield from _one_by_one(group.points[~known], lambda point: _by_itself(sweep, point, shared))


def _shares(base: _Base) -> bool:
    """Whether rates change neither memory nor what is simulated: not on a CPU as the device.

    Some other systems' memory follows from how fast the machine is.
    """
    case = base.case
    is_known = case.strategy.config is not None or has_closed_form(base.costs, case.strategy)
    return is_known and not case.hardware.device.is_cpu


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
    if sweep.method == "closed-form":
        return {**base.facts, "status": NO_FORMULA, "reason": _why_not(base)}
    return _by_simulation(base.case, base.facts)


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


def _why_not(base: _Base) -> str:
    if has_closed_form(base.costs, base.case.strategy):
        return "lanes slow one another down, or the host does not keep up: simulate it"
    return f"{base.case.strategy.name} has no closed form here: simulate it"


# ---- by formula -------------------------------------------------------------------------------


def _by_formula(
    base: _Base, machines: dict[str, Any], known: Mask, tolerance: float
) -> tuple[Row, Mask]:
    """Return one formula's results for N machines as columns, and where it holds, (N,)."""
    form = ClosedForm(base.costs, base.case.strategy)
    # Those that make no sense are solved too, as anything, and left out.
    steady = form.solve(tolerance=tolerance, **machines)
    found = _times(base.case, steady.step_seconds, steady.stall_seconds, steady.selection_seconds)
    return found, known & steady.applies


# ---- by events --------------------------------------------------------------------------------


def _by_events(
    sweep: Sweep, base: _Base, group: Group, machines: dict[str, Any]
) -> Iterator[Batch]:
    """Yield points of a group by replays of one recording; where there is none, one by one."""
    try:
        recording = recording_of(base.costs, base.case.strategy)
    except CannotRecordError:
        yield from _one_by_one(
            group.points, lambda point: _by_simulation(sweep.case(point), base.facts)
        )
        return
    config = base.case.strategy.config
    every = 0 if config is None else selects_every(config)
    own_rates, count = Rates.of(base.case.hardware), len(group.points)
    rates = np.stack(
        [machines[n] if n in machines else np.full(count, getattr(own_rates, n)) for n in RATES],
        axis=1,
    )
    for places, costs in _by_computing(sweep, base, group):
        for at in range(0, len(places), _REPLAYED):
            own = places[at : at + _REPLAYED]
            found = recording.steady(rates[own], np.array([times_of(costs)]), every)
            columns = {**base.facts, "method": EVENTS, **_simulated(base.case, found)}
            yield Batch.of(group.points[own], columns)


def _by_computing(
    sweep: Sweep, base: _Base, group: Group
) -> Iterator[tuple[NDArray[np.intp], StepCosts]]:
    """Yield the places in a group of points whose device computes as fast, and their costs."""
    peaks = group.places.get(COMPUTE)
    if peaks is None:
        yield np.arange(len(group.points)), base.costs
        return
    for peak in np.unique(peaks):
        (places,) = np.nonzero(peaks == peak)
        case = sweep.case(int(group.points[places[0]]))
        yield places, costs_of(case.workload, case.hardware)


def _by_simulation(case: Case, facts: Row) -> Row:
    found = simulate(costs_of(case.workload, case.hardware), case.strategy, keeps_spans=False)
    columns = {name: column.item() for name, column in _simulated(case, found).items()}
    return {**facts, "method": EVENTS, **columns}


def _simulated(case: Case, found: Prediction | SteadyStates) -> dict[str, NDArray[np.float64]]:
    """Return the columns of what was simulated."""
    moved = {"d2h_bytes": found.d2h_bytes, "h2d_bytes": found.h2d_bytes}
    return _times(case, found.step_seconds, found.stall_seconds, found.selection_seconds, **moved)


def _times(
    case: Case, step: Any, stall: Any, selection: Any, **others: Any
) -> dict[str, NDArray[np.float64]]:
    """Return the columns of times, and others; each may be an array."""
    tokens = case.workload.tokens_per_step * case.hardware.total_devices
    columns = {
        "step_seconds": step,
        "stall_seconds": stall,
        "stall_share": stall / step,
        "selection_seconds": selection,
        "tokens_per_second": tokens / step,
        **others,
    }
    values = rounded(np.stack([np.atleast_1d(value) for value in columns.values()]))
    return dict(zip(columns, values, strict=True))
