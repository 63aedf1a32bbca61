"""Rates: points that differ in how fast their machines are, and in nothing else.

Memory, blocks and windows of such points are the same, and their costs follow from quantities that
the axes name. So they are computed once, and the machines are arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.sweeps.axes.kinds import Axis
from experiments.sweeps.grid import Case, Sweep, with_parts
from sim.hardware.quantity import RANGES
from sim.machine import Rates
from sim.replay.arrays import RATES, rates_of
from sim.replay.tape import times_of
from sim.timing.costs import StepCosts, costs_of
from zenflow.errors import ConfigError

Array = NDArray[np.float64]

_QUANTITIES: Mapping[str, tuple[str, ...]] = {
    "link_rate": ("d2h", "h2d"),
    "link.d2h": ("d2h",),
    "link.h2d": ("h2d",),
    "link.duplex": ("duplex",),
    "host.dram": ("dram",),
    "host.core_bandwidth": ("core_bandwidth",),
    "host.core_update": ("core_update",),
    "cores": ("threads",),
    "host_threads": ("threads",),
}
"""Figures of `Rates.of` that an axis sets, by its target; a later one overrides an earlier one."""
COMPUTE = "tflops"
"""Axis of how fast the device computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Points with the same values of all axes but those of rates."""

    points: NDArray[np.int64]
    """Indices of the points, (N,)."""
    places: Mapping[str, NDArray[np.intp]]
    """Place of each point's value on every axis of rates, (N,)."""

    def of(self, chosen: NDArray[Any]) -> Group:
        """Return some of the points: of a mask or of a slice's places."""
        return Group(
            points=self.points[chosen],
            places={name: places[chosen] for name, places in self.places.items()},
        )


def rate_axes(sweep: Sweep) -> list[Axis]:
    """Return the axes of rates, those that others override first."""
    order = (COMPUTE, *_QUANTITIES)
    own = [axis for axis in sweep.axes if axis.kind.target in order and axis.is_number]
    own = [axis for axis in own if axis.kind.place in ("figure", "machine")]
    return sorted(own, key=lambda axis: order.index(axis.kind.target))


def _keys(sweep: Sweep, points: NDArray[np.int64]) -> tuple[NDArray[Any], dict[str, NDArray[Any]]]:
    """Return each point's number of a group, and its place on every axis of rates."""
    shape = [len(axis.values) for axis in sweep.axes]
    places = np.unravel_index(points, shape) if shape else ()
    names = {axis.name for axis in rate_axes(sweep)}
    key = np.zeros(len(points), dtype=np.int64)
    found = {}
    for axis, place in zip(sweep.axes, places, strict=True):
        if axis.name in names:
            found[axis.name] = place
        else:
            key = key * len(axis.values) + place
    return key, found


def in_groups(sweep: Sweep, points: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return points with those of a group next to one another, so that tasks have whole groups."""
    ordered: NDArray[np.int64] = points[np.argsort(_keys(sweep, points)[0], kind="stable")]
    return ordered


def groups_of(sweep: Sweep, points: NDArray[np.int64]) -> Iterator[Group]:
    """Yield points by group."""
    key, places = _keys(sweep, points)
    order = np.argsort(key, kind="stable")
    whole = Group(points=points, places=places)
    for own in np.split(order, np.flatnonzero(np.diff(key[order])) + 1):
        if len(own):
            yield whole.of(own)


def machines_of(
    sweep: Sweep, case: Case, costs: StepCosts, group: Group
) -> tuple[Array, Array, NDArray[np.bool_]]:
    """Return the rates and times of a group's machines, and which of them make sense.

    Args:
        sweep: What is predicted.
        case: One of the points.
        costs: Costs of that point.
        group: The points, N.

    Returns:
        `RATES` of each point, (N, 12); `times_of` each, (N, P), or of all, (1, P); and a mask,
        (N,). A machine that makes no sense has other values, which are positive.
    """
    count = len(group.points)
    known = np.ones(count, dtype=bool)
    quantities: dict[str, Array] = {}
    times = np.array([times_of(costs)])
    for axis in rate_axes(sweep):
        place, kind = group.places[axis.name], axis.kind
        used, where = np.unique(place, return_inverse=True)
        values = np.array([float(axis.values[at]) * kind.scale for at in used])
        if kind.target == COMPUTE:
            times, makes_sense = _each(lambda peak: _computed(case, peak), values)
            times = times[where]
        elif kind.target in ("cores", "host_threads"):
            threads, makes_sense = _each(lambda value: _threads(case, kind.target, value), values)  # noqa: B023
            quantities["threads"] = threads[where]
        else:
            low, high = RANGES.get(kind.target, (0.0, np.inf))
            makes_sense = (values > 0) & (values >= low) & (values <= high)
            values = np.where(makes_sense, values, 1.0)
            quantities |= dict.fromkeys(_QUANTITIES[kind.target], values[where])
        known &= makes_sense[where]
    rates = np.tile(rates_of(costs), (count, 1))
    found = Rates.of(case.hardware, quantities=quantities)
    for column, name in enumerate(RATES):
        if hasattr(found, name):
            rates[:, column] = getattr(found, name)
    return rates, times, known


def _computed(case: Case, peak: float) -> Array:
    """Return the times of a machine whose device has this peak."""
    hardware = with_parts(case.hardware, {COMPUTE: peak}, {}, case.workload.dtype)
    return np.array(times_of(costs_of(case.workload, hardware)))


def _threads(case: Case, target: str, value: float) -> Array:
    hardware = with_parts(case.hardware, {target: value}, {}, case.workload.dtype)
    return np.array(float(hardware.threads_per_device))


def _each(find: Callable[[float], Array], values: Array) -> tuple[Array, NDArray[np.bool_]]:
    """Return a function's result for every value, ones where it fails, and where it does not."""
    found: list[Array | None] = []
    for value in values:
        try:
            found.append(find(float(value)))
        except ConfigError:
            found.append(None)
    usual = next((own for own in found if own is not None), np.ones(1))
    filled = [np.ones_like(usual) if own is None else own for own in found]
    return np.array(filled), np.array([own is not None for own in found])
