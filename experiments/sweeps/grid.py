"""Grid: a sweep's settings and axes, and the machine, workload and strategy of each point."""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from experiments.request.hardware import hardware_of
from experiments.request.request import DEFAULT_STRATEGY, SYSTEM_OPTIONS, Request
from experiments.request.words import Value
from experiments.request.workload import notes_on_positions, workload_of
from experiments.sweeps.axes.kinds import Axis, AxisKind
from zenflow.errors import ConfigError

if TYPE_CHECKING:
    from sim.hardware.profile import HardwareProfile
    from sim.models.workload import Workload
    from sim.simulate import Strategy

MOST_POINTS = 1_000_000
_TRIED = 500
"""Points among which one must make sense before a sweep begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One point, ready to be predicted."""

    workload: Workload
    hardware: HardwareProfile
    strategy: Strategy

    def check(self) -> None:
        """Refuse what only a schedule knows to be wrong.

        Raises:
            ConfigError: The strategy has no such option, or the device no peak for the dtype.
        """
        from sim.machine import Machine
        from sim.timing.costs import costs_of

        self.strategy.schedule(Machine(self.hardware), costs_of(self.workload, self.hardware))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Grid of points, and the facts that all of them share.

    Raises:
        ConfigError: A name is unknown, or the grid is too large.
    """

    axes: tuple[Axis, ...]
    request: Request = field(default_factory=Request)
    """Machine, workload and strategy, where no axis says otherwise."""
    knobs: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the update rule that no axis varies."""

    def __post_init__(self) -> None:
        """Check the size."""
        if self.num_points > MOST_POINTS:
            counts = " x ".join(f"{len(axis.values)} {axis.name}" for axis in self.axes)
            raise ConfigError(
                f"{counts} are {self.num_points:,} points, more than {MOST_POINTS:,}: make steps "
                "larger, or leave an axis out"
            )

    @property
    def num_points(self) -> int:
        """Points of the grid."""
        return math.prod(len(axis.values) for axis in self.axes)

    def values(self, index: int) -> dict[str, Value]:
        """Return a point's value on every axis; the last axis varies fastest."""
        found: dict[str, Value] = {}
        for axis in reversed(self.axes):
            index, place = divmod(index, len(axis.values))
            found[axis.name] = axis.values[place]
        return {axis.name: found[axis.name] for axis in self.axes}

    def case(self, index: int) -> Case:
        """Return a point's machine, workload and strategy.

        Raises:
            ConfigError: Its values don't go together.
        """
        knobs = dict(self.knobs)
        figures: dict[str, float] = {}
        parts: dict[str, float] = {}
        values = self.values(index)
        for axis in self.axes:
            kind, value = axis.kind, values[axis.name]
            if kind.place == "knob":
                knobs[kind.target] = value
            elif kind.place == "figure":
                figures[kind.target] = float(_scaled(kind, value))  # type: ignore[arg-type]
            elif kind.place == "machine":
                parts[kind.target] = float(_scaled(kind, value))  # type: ignore[arg-type]
        request = self._request(values)
        work = request.work
        workload = _workload(work)
        return Case(
            workload=workload,
            hardware=with_parts(_machine(work), parts, figures, workload.dtype),
            strategy=self._strategy(request, knobs),
        )

    def _strategy(self, request: Request, knobs: dict[str, Any]) -> Strategy:
        """Return a point's strategy.

        One that stands alone takes every setting that is given, or refuses it. Beside others each
        takes its own: settings of the update rule are those of ``zenflow*``, and a system takes
        the options that it has and shares a model in its own way.
        """
        from sim.simulate import SYSTEMS, Strategy

        name = request.strategy
        if all(axis.name != "strategy" for axis in self.axes):
            return request.to_strategy(**knobs)
        if name in SYSTEMS:
            return Strategy.of(name, **SYSTEMS[name].those_of(request.options))
        own = knobs if name in ("zenflow", "zenflow_paper") else {}
        without: dict[str, Any] = dict.fromkeys(SYSTEM_OPTIONS)
        return replace(request, **without).to_strategy(**own)

    def machine(self, index: int) -> HardwareProfile:
        """Return a point's machine, with the figures that its parts have in the table.

        Raises:
            ConfigError: Its parts don't go together.
        """
        return _machine(self._request(self.values(index)).work)

    def _request(self, values: Mapping[str, Value]) -> Request:
        """Return machine, workload and strategy as a point's values name them."""
        named: dict[str, Any] = {
            axis.kind.target: _scaled(axis.kind, values[axis.name])
            for axis in self.axes
            if axis.kind.place in ("request", "strategy")
        }
        return replace(self.request, **named)

    def check(self) -> None:
        """Refuse a sweep in which no point makes sense, as the first one says why.

        Raises:
            ConfigError: None of the first points does.
        """
        first: ConfigError | None = None
        for index in range(min(self.num_points, _TRIED)):
            try:
                self.case(index).check()
            except ConfigError as error:
                first = first or error
            else:
                return
        if first is not None:
            raise first

    def to_dict(self) -> dict[str, Any]:
        """Return everything that decides a row, JSON-ready: another sweep has another."""
        settings = asdict(self.request)
        strategy = {name: settings.pop(name) for name in DEFAULT_STRATEGY}
        settings["model"] = self.request.model or None
        # These are left out at their defaults, as journals have them.
        names = (
            "parallel", "reshard_after_forward", "stream", "resident_layers", "state_on_drive",
        )  # fmt: skip
        sharing = {name: strategy[name] for name in names}
        return json.loads(  # type: ignore[no-any-return]
            json.dumps(
                {
                    "axes": {axis.name: list(axis.values) for axis in self.axes},
                    "settings": {k: v for k, v in settings.items() if v is not None},
                    "strategy": strategy["strategy"],
                    "knobs": {**self.knobs, **self.request.options},
                    "gradients": strategy["gradients"],
                    **{k: v for k, v in sharing.items() if v != DEFAULT_STRATEGY[k]},
                },
                default=str,
            )
        )


def _scaled(kind: AxisKind, value: Value) -> Value:
    """Return an axis's value in SI units."""
    return value if kind.scale == 1 else float(value or 0.0) * kind.scale


@functools.lru_cache(maxsize=1024)
def _machine(request: Request) -> HardwareProfile:
    return hardware_of(request)[0]


def notes_of(sweep: Sweep) -> list[str]:
    """Return the assumptions about the machines, each once.

    Only parts of the machine that axes name decide them, so no more combinations are looked at.
    """
    axes = [axis for axis in sweep.axes if axis.kind.place == "request"]
    notes: dict[str, None] = {}
    for values in itertools.islice(itertools.product(*(a.values for a in axes)), _TRIED):
        named: dict[str, Any] = {
            axis.kind.target: value for axis, value in zip(axes, values, strict=True)
        }
        request = replace(sweep.request, **named)
        try:
            notes |= dict.fromkeys([*hardware_of(request)[1], *notes_on_positions(request)])
        except ConfigError:
            continue  # such points are rows that say so
    return list(notes)


@functools.lru_cache(maxsize=1024)
def _workload(request: Request) -> Workload:
    return workload_of(request, _machine(request))


def with_parts(
    hardware: HardwareProfile,
    parts: Mapping[str, float],
    figures: Mapping[str, float],
    dtype: str,
) -> HardwareProfile:
    """Return a machine with a point's own figures.

    Args:
        hardware: The machine.
        parts: Values of axes that are parts of it, by target.
        figures: Values of its figures by dotted name.
        dtype: Of the workload, whose peak ``tflops`` is.

    Raises:
        ConfigError: It has no such figure, or a value breaks a rule.
    """
    values = dict(figures)
    if "link_rate" in parts:
        values = {"link.d2h": parts["link_rate"], "link.h2d": parts["link_rate"], **values}
    if "tflops" in parts:
        values[f"device.flops.{dtype}"] = parts["tflops"]
    if "cores" in parts:
        hardware = _with_cores(hardware, int(parts["cores"]))
    if "host_threads" in parts:
        hardware = replace(hardware, host_threads=int(parts["host_threads"]))
    return hardware.with_values(values) if values else hardware


def _with_cores(hardware: HardwareProfile, cores: int) -> HardwareProfile:
    sockets = hardware.host.sockets
    if cores % sockets:
        raise ConfigError(f"{cores} cores can't be shared out to {sockets} sockets")
    host = replace(hardware.host, cores=cores // sockets)
    return replace(hardware, host=host, host_threads=None)
