"""Constraints: limits on memory, staleness and captured energy, and the reason if none can be met.

A setting's needs are known without running it: memory from `sim.memory.need`, staleness from the
rule, captured energy from a curve where one is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from autotune.space import SearchSpace
from sim.hardware.profile import HardwareProfile
from sim.memory.need import memory_of
from sim.models.workload import Workload
from sim.simulate import Strategy
from zenflow.config import ZenFlowConfig, raise_violations
from zenflow.errors import NoRoomError
from zenflow.knobs import Knobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Memory, staleness and captured energy of a setting. See `needs_of`."""

    device_bytes: float
    """Bytes of one device: model, activations, optimizer."""
    host_bytes: float
    """Bytes of the host for all devices, and theirs too where a CPU plays the device."""
    staleness: int
    """Largest age in steps of a gradient when its update lands; 0 if nothing is deferred."""
    captured: float | None
    """Share of gradient energy in the important columns; None while no curve is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """Limits on a setting's `Need`; None is no limit.

    Raises:
        ConfigError: A limit is one that nothing could meet.

    Examples:
        >>> limits = Constraints(largest_staleness=4)
        >>> limits.misses(Need(device_bytes=1e9, host_bytes=1e9, staleness=5, captured=None))
        {'largest_staleness': 0.25}
    """

    device_bytes: float | None = None
    """Largest memory of one device, bytes, model and activations included."""
    host_bytes: float | None = None
    """Largest memory of the host for all devices, bytes."""
    largest_staleness: int | None = None
    """Largest staleness, steps; a setting's own is S + 1, and S without overlap."""
    smallest_captured: float | None = None
    """Least share of gradient energy in the important columns, in (0, 1)."""

    def __post_init__(self) -> None:
        """Check every limit by itself."""
        raise_violations("the constraints", self._violations())

    def _violations(self) -> Iterator[str]:
        for name in ("device_bytes", "host_bytes"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                yield f"{name} must be a positive number of bytes, got {value!r}: None is no limit"
        steps = self.largest_staleness
        if steps is not None and (steps != int(steps) or steps < 1):
            yield (
                f"largest_staleness must be a whole number of at least 1 step, got {steps!r}: "
                "a window has at least one"
            )
        share = self.smallest_captured
        if share is not None and not 0 < share < 1:
            yield (
                f"smallest_captured must lie in (0, 1), got {share!r}: all energy is captured "
                "only where nothing is deferred (strategy on_device)"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the constraints that are set."""
        return tuple(limit.name for limit in _limits(self))

    def misses(self, need: Need) -> dict[str, float]:
        """Return the share of its limit by which a need misses each constraint; 0 if met.

        Energy that is not known misses nothing.
        """
        return {
            limit.name: max(0.0, limit.missed_by(need) / limit.bound) for limit in _limits(self)
        }

    def within(self, hardware: HardwareProfile) -> Constraints:
        """Return the limits, with a machine's own memory where that is smaller."""
        device = None if hardware.device.is_cpu else hardware.device.memory.value
        return replace(
            self,
            device_bytes=_smaller(self.device_bytes, device),
            host_bytes=_smaller(self.host_bytes, hardware.host.dram_bytes.value),
        )


def _smaller(limit: float | None, room: float | None) -> float | None:
    return min((value for value in (limit, room) if value is not None), default=None)


def needs_of(
    workload: Workload,
    hardware: HardwareProfile,
    *,
    releases: bool = True,
    captured: Callable[[float], float] | None = None,
    base: ZenFlowConfig | None = None,
) -> Callable[[Knobs], Need]:
    """Return the function from knobs to what they need for a workload on a machine.

    Args:
        workload: Model and batch of each device.
        hardware: The machine.
        releases: Whether gradients leave during backward.
        captured: Share of gradient energy in the important columns by ``topk_ratio``, such as an
            energy curve's method; None where nothing is known of it.
        base: Everything of the configuration that is no knob; None is the default.

    Examples:
        >>> from sim.hardware.catalog import find_machine
        >>> from sim.models.table import find_model
        >>> workload = Workload.of_config(*find_model("gpt2"))
        >>> need = needs_of(workload, find_machine("hgx-h100", 1))(Knobs.of(ZenFlowConfig()))
        >>> need.staleness, need.device_bytes < 80e9
        (5, True)
    """
    config = base or ZenFlowConfig()
    memory: dict[Knobs, tuple[float, float]] = {}

    def need(knobs: Knobs) -> Need:
        # Selections need no memory of their own, so that settings differing in them are one.
        key = replace(knobs, select_interval=0)
        if key not in memory:
            strategy = Strategy(name="zenflow", config=key.applied_to(config), releases=releases)
            own = memory_of(workload, strategy, hardware)
            shared = hardware.num_devices * own.device_bytes if hardware.device.is_cpu else 0.0
            memory[key] = (own.device_bytes, own.host_bytes + shared)
        device_bytes, host_bytes = memory[key]
        return Need(
            device_bytes=device_bytes,
            host_bytes=host_bytes,
            staleness=staleness_of(knobs, config),
            captured=None if captured is None else captured(knobs.topk_ratio),
        )

    return need


def staleness_of(knobs: Knobs, base: ZenFlowConfig | None = None) -> int:
    """Return the largest age in steps at which a gradient's update lands: S and the lag.

    >>> staleness_of(Knobs.of(ZenFlowConfig(update_interval=4)))
    5
    """
    if knobs.topk_ratio == 1:
        return 0
    config = base or ZenFlowConfig()
    return knobs.update_interval + config.effective_lag(knobs.update_interval)


class Feasibility:
    """Settings of a search space that meet the constraints; each need is worked out once.

    Examples:
        >>> space = SearchSpace(update_intervals=(1, 4, 8))
        >>> def need(knobs):
        ...     age = staleness_of(knobs)
        ...     return Need(device_bytes=0, host_bytes=0, staleness=age, captured=None)
        >>> feasibility = Feasibility(Constraints(largest_staleness=5), need, space)
        >>> sorted({knobs.update_interval for knobs in space.grid() if feasibility.allows(knobs)})
        [1, 4]
    """

    def __init__(
        self, constraints: Constraints, need: Callable[[Knobs], Need], space: SearchSpace
    ) -> None:
        """Start with no needs known; ``need`` is the function that finds them."""
        self.constraints = constraints
        self._need = need
        self._space = space
        self._known: dict[Knobs, Need] = {}
        self._limits = tuple(_limits(constraints))

    def need(self, knobs: Knobs) -> Need:
        """Return the needs of a setting."""
        if knobs not in self._known:
            self._known[knobs] = self._need(knobs)
        return self._known[knobs]

    def allows(self, knobs: Knobs) -> bool:
        """Return whether a setting meets every constraint."""
        return _meets(self.need(knobs), self._limits)

    def misses(self, knobs: Knobs) -> Mapping[str, float]:
        """Return the share of its limit by which a setting misses each constraint."""
        return self.constraints.misses(self.need(knobs))

    def check(self) -> None:
        """Return if some setting of the space meets all constraints.

        Raises:
            NoRoomError: None does. The message names the fewest constraints that conflict, and by
                how much each is missed while the others are kept.
        """
        if any(self.allows(knobs) for knobs in self._space.grid()):
            return
        points = [(knobs, self.need(knobs)) for knobs in self._space.grid()]
        for size in range(1, len(self._limits) + 1):
            for limits in combinations(self._limits, size):
                if not any(_meets(need, limits) for _, need in points):
                    raise NoRoomError(_conflict(limits, points))


_Points = Sequence[tuple[Knobs, Need]]


@dataclass(frozen=True, slots=True)
class _Limit:
    """One constraint, to be compared and to be shown."""

    name: str
    bound: float
    value: Callable[[Need], float | None]
    shown: Callable[[float], str]
    """Function that words an amount."""
    what: str
    """Limited quantity in words."""
    is_least: bool = False

    def missed_by(self, need: Need) -> float:
        """Return the amount by which a need misses the limit: 0 or less if it is met."""
        value = self.value(need)
        if value is None:
            return 0.0
        return self.bound - value if self.is_least else value - self.bound

    def __str__(self) -> str:
        """Return the constraint in words."""
        return f"{self.what} {'>=' if self.is_least else '<='} {self.shown(self.bound)}"

    def nearest(self, points: _Points) -> tuple[Knobs, str]:
        """Return the setting that comes nearest to the limit, and its distance in words."""
        knobs, need = min(points, key=lambda point: self.missed_by(point[1]))
        value = self.value(need)
        assert value is not None
        missed = self.shown(self.missed_by(need))
        if self.is_least:
            return knobs, f"{self.what} reaches {self.shown(value)}, {missed} too little"
        return knobs, f"{self.what} comes down to {self.shown(value)}, {missed} too much"


def _limits(constraints: Constraints) -> Iterator[_Limit]:
    made: tuple[tuple[str, Callable[[Need], float | None], Callable[[float], str], str], ...] = (
        ("device_bytes", lambda need: need.device_bytes, _size, "device memory"),
        ("host_bytes", lambda need: need.host_bytes, _size, "host memory"),
        ("largest_staleness", lambda need: need.staleness, _steps, "staleness"),
        ("smallest_captured", lambda need: need.captured, "{:.3g}".format, "captured energy"),
    )
    for name, value, shown, what in made:
        bound = getattr(constraints, name)
        if bound is not None:
            yield _Limit(name, bound, value, shown, what, is_least=name == "smallest_captured")


def _meets(need: Need, limits: Sequence[_Limit]) -> bool:
    return all(limit.missed_by(need) <= 0 for limit in limits)


def _conflict(limits: Sequence[_Limit], points: _Points) -> str:
    """Return a sentence on the constraints that can't be met together, and their misses."""
    if len(limits) == 1:
        knobs, nearest = limits[0].nearest(points)
        return (
            f"{limits[0]} ({limits[0].name}) can't be met by any setting of the search space: "
            f"{nearest}, with {knobs}. Relax it, or search other settings."
        )
    near: list[str] = []
    for limit in limits:
        others = [other for other in limits if other is not limit]
        kept = [point for point in points if _meets(point[1], others)]
        near.append(f"with {_listed(others)} kept, {limit.nearest(kept)[1]}")
    start = f"{_listed(limits)} can't be met together"
    if len(limits) == 2:
        start = _parted_by(limits[0], limits[1], points) or start
        return f"{start}: {'; '.join(near)}. Relax one of the two."
    return f"{start}, though any {len(limits) - 1} of them can: {'; '.join(near)}. Relax one."


def _parted_by(one: _Limit, other: _Limit, points: _Points) -> str | None:
    """Return a sentence on two constraints that no value of one knob meets; None without one."""
    for name in ("topk_ratio", "update_interval"):
        for low, high in ((one, other), (other, one)):
            most = max(getattr(k, name) for k, need in points if low.missed_by(need) <= 0)
            least = min(getattr(k, name) for k, need in points if high.missed_by(need) <= 0)
            if least > most:
                return f"{high} needs {name} >= {least:g}, but {low} allows {name} <= {most:g}"
    return None


def _listed(limits: Sequence[_Limit]) -> str:
    *first, last = [str(limit) for limit in limits]
    return f"{', '.join(first)} and {last}" if first else last


def _size(num_bytes: float) -> str:
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.3g} {unit}"
    return f"{num_bytes:.3g} B"


def _steps(steps: float) -> str:
    return f"{steps:g} step{'' if steps == 1 else 's'}"
