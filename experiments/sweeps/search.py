"""Search: the cheapest point of a grid that is fast enough, without the whole grid.

- How fast a point is, `zenflow plan` says: by the setting that it would recommend there.
- Cost is a price or the value of an axis, so it is known of every point before any is predicted.
- A device that computes faster, a faster link, faster memory or more cores make no step much
  longer. So of points that differ in these alone the largest values are looked at first, and an
  axis of them is bisected. Where flows share memory, one that begins earlier may delay another:
  by up to 2.5 % in what was simulated. On a faster machine a plan may also recommend a
  slower setting that is nearer to AdamW. A cheaper point that is fast enough may be missed so.
- A step is never shorter than the work of its busiest lane. Points that are too slow by that are
  left out unseen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experiments.sweeps.axes.kinds import Axis
from experiments.sweeps.columns import Row
from experiments.sweeps.grid import Sweep
from experiments.sweeps.planned import PlannedPoint, PlannedPoints
from experiments.sweeps.prices import COLUMN, add_prices, unpriced
from experiments.sweeps.rates import rate_axes
from sim.planning.options import Option
from zenflow.config import unknown_name
from zenflow.errors import ConfigError

_PARTS = ("gpu", "machine", "host", "link", "num_gpus", "num_hosts")
"""Axes that decide which parts a machine has, and so its price."""
_ROUNDING = 1 + 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPoint:
    """A point with what to use there."""

    point: int
    """Index of the point."""
    cost: float
    """Price of the point in dollars, or its value of the axis."""
    option: Option
    """Setting with which it is fast enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cheapest:
    """The answer of a search."""

    found: FoundPoint | None
    """Cheapest point whose recommended setting is fast enough; None if none is."""
    riskier: FoundPoint | None
    """Point that is cheaper still, and fast enough with a setting that may not fit; None if none
    was seen."""
    fastest: Option | None
    """Fastest recommended setting that was looked at."""
    looked_at: int
    """Number of points that were planned."""


def cheapest(
    sweep: Sweep,
    column: str,
    rate: float,
    prices: Mapping[str, float] | None = None,
    *,
    holds: Collection[str] = (),
    say: Callable[[str], None] = lambda text: None,
) -> Cheapest:
    """Return the point of least cost whose tokens per second are at least so many.

    Args:
        sweep: The grid.
        column: What is to be least: an axis of numbers, or `COLUMN`.
        rate: Tokens per second over all devices.
        prices: Prices of parts, for `COLUMN`.
        holds: What of a setting was given, as of `PlannedPoints`; all else is searched.
        say: Takes what is done by now, in words.

    Raises:
        ConfigError: The column is none of these, prices are missing, or no point makes sense.
    """
    _check(sweep, column, prices or {})
    sweep.check()
    search = _Search(sweep, rate, holds, say)
    ordered = next((axis for axis in rate_axes(sweep) if axis.name == column), None)
    corners = _corners(sweep)
    if ordered is not None:
        values = sorted(_numbers(ordered))
        for corner in search.promising(corners):
            _bisect(search, ordered, values, corner)
        return search.answer()
    costs = _prices(sweep, corners, prices or {}) if column == COLUMN else _values(
        sweep, corners, column
    )  # fmt: skip
    for cost in np.unique(costs[np.isfinite(costs)]).tolist():
        for corner in search.promising(corners[costs == cost]):
            if search.is_enough(corner, cost):
                return search.answer()
    return search.answer()


def _check(sweep: Sweep, column: str, prices: Mapping[str, float]) -> None:
    known = [COLUMN, *(axis.name for axis in sweep.axes if axis.is_number)]
    if column not in known:
        raise ConfigError(f"--find {unknown_name(column, known)}: vary it, or give --price")
    if column == COLUMN and not prices:
        raise ConfigError(f"--find {COLUMN} needs prices: give --price rtx4090=1600, say")


def _numbers(axis: Axis) -> list[float]:
    return [float(value) for value in axis.values]  # type: ignore[arg-type]


def _corners(sweep: Sweep) -> NDArray[np.int64]:
    """Return the points with the largest value of every axis on which more is never slower."""
    names = {axis.name for axis in rate_axes(sweep)}
    shape = [len(axis.values) for axis in sweep.axes]
    places = [
        [int(np.argmax(_numbers(axis)))] if axis.name in names else range(len(axis.values))
        for axis in sweep.axes
    ]
    grid = np.meshgrid(*places, indexing="ij")
    found: NDArray[np.int64] = np.ravel_multi_index([own.ravel() for own in grid], shape)
    return found


def _values(sweep: Sweep, points: NDArray[np.int64], column: str) -> NDArray[np.float64]:
    index = [axis.name for axis in sweep.axes].index(column)
    places = np.unravel_index(points, [len(axis.values) for axis in sweep.axes])
    return np.array(_numbers(sweep.axes[index]))[places[index]]


def _prices(
    sweep: Sweep, points: NDArray[np.int64], prices: Mapping[str, float]
) -> NDArray[np.float64]:
    """Return each point's price; NaN where the machine makes no sense.

    Raises:
        ConfigError: A part has no price, though another one of its kind has.
    """
    import pandas as pd

    known: dict[tuple[object, ...], int] = {}
    machines: list[Row] = []
    which = []
    for point in points.tolist():
        values = sweep.values(point)
        key = tuple(values.get(name) for name in _PARTS)
        if key not in known:
            known[key] = len(machines)
            machines.append(_parts(sweep, point))
        which.append(known[key])
    frame = pd.DataFrame(machines)
    if missing := unpriced(frame, prices):
        flags = " ".join(f"--price {name}=USD" for name in missing)
        raise ConfigError(
            f"--find {COLUMN} needs a price of every part that is compared, and there is none of "
            f"{', '.join(missing)}: give {flags}, or leave them out"
        )
    priced = add_prices(frame, prices)[COLUMN]
    return np.asarray(priced, dtype=np.float64)[which]


def _parts(sweep: Sweep, point: int) -> Row:
    try:
        hardware = sweep.machine(point)
    except ConfigError:
        names = dict.fromkeys(("device_name", "host_name", "link_name"), "")
        return {"num_devices": math.nan, "num_hosts": math.nan, **names}
    return {
        "num_devices": hardware.total_devices,
        "num_hosts": hardware.num_hosts,
        "device_name": hardware.device.name,
        "host_name": hardware.host.name,
        "link_name": hardware.link.name,
    }


class _Search:
    """Points looked at so far, and the cheapest one that is fast enough."""

    def __init__(
        self, sweep: Sweep, rate: float, holds: Collection[str], say: Callable[[str], None]
    ) -> None:
        self.sweep = sweep
        self._rate = rate
        self._say = say
        self._plans = PlannedPoints(sweep, holds)
        self._known: dict[int, PlannedPoint | None] = {}
        self._found: FoundPoint | None = None
        self._riskier: FoundPoint | None = None

    @property
    def cost(self) -> float:
        """Cost of the cheapest point so far; infinite if there is none."""
        return math.inf if self._found is None else self._found.cost

    def is_enough(self, corner: int, cost: float) -> bool:
        """Whether a point, or one that its rates stand for, is fast enough; it is kept if so."""
        for point in self._meant(corner):
            planned = self._planned(point)
            if planned is None:
                continue
            if planned.option is not None and planned.option.tokens_per_second >= self._rate:
                self._found = FoundPoint(point=point, cost=cost, option=planned.option)
                return True
            enough = [one for one in planned.riskier if one.tokens_per_second >= self._rate]
            if enough and (self._riskier is None or cost < self._riskier.cost):
                self._riskier = FoundPoint(point=point, cost=cost, option=enough[0])
        return False

    def _meant(self, corner: int) -> Iterator[int]:
        """Yield a corner; where it makes no sense the points of the grid that do instead."""
        yield corner
        if self._planned(corner) is None:
            yield from self._others(corner)

    def _others(self, corner: int) -> Iterator[int]:
        """Yield the points that differ from one in rates alone, the fastest first."""
        names = {axis.name for axis in rate_axes(self.sweep)}
        shape = [len(axis.values) for axis in self.sweep.axes]
        own = np.unravel_index(corner, shape)
        places = [
            np.argsort(_numbers(axis))[::-1] if axis.name in names else [place]
            for axis, place in zip(self.sweep.axes, own, strict=True)
        ]
        grid = np.meshgrid(*places, indexing="ij")
        yield from np.ravel_multi_index([part.ravel() for part in grid], shape).tolist()

    def _planned(self, point: int) -> PlannedPoint | None:
        """Return the setting to use at a point; None if its values don't go together."""
        if point not in self._known:
            try:
                self._known[point] = self._plans.plan(point)
            except ConfigError:
                self._known[point] = None
            self._say(f"{len(self._known)} points planned")
        return self._known[point]

    def promising(self, points: NDArray[np.int64]) -> list[int]:
        """Return the points that may be fast enough, those that promise most first."""
        bounds = {}
        for number, point in enumerate(points.tolist()):
            self._say(f"{len(self._known)} points planned, {number} of {len(points)} bounded")
            bounds[point] = self._bound(point)
        enough = [point for point, bound in bounds.items() if bound >= self._rate]
        return sorted(enough, key=lambda point: -bounds[point])

    def _bound(self, point: int) -> float:
        """Return tokens per second that a point can't exceed."""
        try:
            return self._plans.most_tokens_per_second(point) * _ROUNDING
        except ConfigError:
            return math.inf  # rates that make no sense: others may

    def answer(self) -> Cheapest:
        """Return the result of the search."""
        options = [one.option for one in self._known.values() if one and one.option]
        riskier = self._riskier
        return Cheapest(
            found=self._found,
            riskier=riskier if riskier is not None and riskier.cost < self.cost else None,
            fastest=max(options, key=lambda own: own.tokens_per_second, default=None),
            looked_at=len(self._known),
        )


def _bisect(search: _Search, axis: Axis, values: Sequence[float], corner: int) -> None:
    """Find the least value of an axis with which a corner is fast enough, if it is a new best."""
    sweep = search.sweep
    shape = [len(own.values) for own in sweep.axes]
    index = [own.name for own in sweep.axes].index(axis.name)
    places = list(np.unravel_index(corner, shape))
    own_values = _numbers(axis)

    def is_enough(value: float) -> bool:
        places[index] = np.intp(own_values.index(value))
        return search.is_enough(int(np.ravel_multi_index(places, shape)), value)

    cheaper = [value for value in values if value < search.cost]
    if not cheaper or not is_enough(cheaper[-1]):
        return
    low, high = 0, len(cheaper) - 1  # the one at `high` is enough
    while low < high:
        middle = (low + high) // 2
        if is_enough(cheaper[middle]):
            high = middle
        else:
            low = middle + 1
