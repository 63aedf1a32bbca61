"""Plan: which setting to use on a machine, how fast it would be, and what would help.

Only what this package's engine runs is recommended; other systems stand beside it. Nothing is run:
times are `sim.simulate`'s, memory is `sim.memory.need`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sim.fitting.left_out import left_out_of
from sim.fitting.uncertainty import Interval, interval_of
from sim.hardware.profile import HardwareProfile
from sim.memory.need import memory_of
from sim.models.table import find_model, model_names
from sim.models.workload import Workload
from sim.planning.improvements import Improvement, faster_parts, more_memory
from sim.planning.options import Option, Planner, default_reserve
from sim.planning.rules import EXACT
from sim.planning.search import Search, fewer_tokens
from sim.simulate import STRATEGIES, SYSTEMS, Strategy
from sim.timing.division import Division

DRAWS = 100
"""Number of draws of the machine's uncertain figures for an interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a machine can do for a workload."""

    workload: Workload
    """Model and tokens of a step, as asked for."""
    hardware: HardwareProfile
    """Machine with all its devices."""
    parallel: str
    """How devices share the model, one of `sim.timing.division.PARALLELS`."""
    reserve: float
    """Bytes that stay free on each device and on the host."""
    options: tuple[Option, ...]
    """Best option of each preset of the engine, then of each other system."""
    recommended: Option | None
    """Option to use; None if no preset of the engine fits."""
    per_devices: tuple[Option, ...]
    """Best option for each number of devices that was compared, most devices first."""
    exact: Option | None
    """Fastest option whose rule is AdamW exactly.

    None if the recommended option's rule is, or if none fits."""
    tight: Option | None
    """Option that leaves less than the reserve, with more tokens to a step than the recommended
    one; None if there is none."""
    interval: Interval | None
    """Interval of the recommended option's tokens per second; None if no draws were asked for."""
    improvements: tuple[Improvement, ...]
    """Changes of the machine that would help, those to make first at the front."""
    largest: str | None = None
    """Largest model of the table that one device trains; None unless this one's weights exceed a
    device."""

    @property
    def needs_sharding(self) -> bool:
        """Whether a device's weights alone exceed it."""
        return is_too_large(self.workload, self.hardware, self.parallel)

    @property
    def has_fewer_tokens(self) -> bool:
        """Whether the recommended option has fewer tokens to a step than were asked for."""
        chosen = self.recommended
        if chosen is None:
            return False
        return chosen.need.workload.tokens_per_step < self.workload.tokens_per_step

    def option(self, name: str) -> Option:
        """Return a strategy's option."""
        return next(option for option in self.options if option.strategy.name == name)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        named = {name: getattr(self, name) for name in ("recommended", "exact", "tight")}
        told = self.interval
        return {
            "model": self.workload.name,
            "num_params": self.workload.num_params,
            "machine": self.hardware.name,
            "num_devices": self.hardware.total_devices,
            "num_hosts": self.hardware.num_hosts,
            "parallel": self.parallel,
            "batch_size": self.workload.batch_size,
            "sequence": self.workload.sequence,
            "accumulation": self.workload.accumulation,
            "dtype": self.workload.dtype,
            "reserve": self.reserve,
            "needs_sharding": self.needs_sharding,
            "largest": self.largest,
            **{name: option and option.to_dict() for name, option in named.items()},
            "tokens_per_second_interval": None
            if told is None
            else {"low": told.low, "high": told.high, "coverage": told.coverage},
            "per_devices": [option.to_dict() for option in self.per_devices],
            "options": [option.to_dict() for option in self.options],
            "improvements": [item.to_dict() for item in self.improvements],
        }


def plan(
    workload: Workload,
    hardware: HardwareProfile,
    *,
    strategies: Sequence[str] = STRATEGIES,
    checkpointing: bool | None = None,
    reserve: float | None = None,
    draws: int = DRAWS,
    parallel: str = "ddp",
    reshards: bool = True,
    options: Mapping[str, Any] | None = None,
) -> Plan:
    """Return what a machine can do for a workload.

    Args:
        workload: Model, and tokens of a step on each device; how these are cut into micro-batches
            is searched.
        hardware: The machine. Fewer of its devices are looked at too.
        strategies: Names of presets and of other systems to look at.
        checkpointing: Whether backward recomputes activations; None tries both.
        reserve: Bytes to leave free on each device and on the host; None is `default_reserve`.
        draws: Number of draws of uncertain figures for the interval; 0 makes none.
        parallel: How devices share the model, one of `sim.timing.division.PARALLELS`.
        reshards: Whether sharded weights are dropped behind forward.
        options: Options of other systems, of which each takes those that it has.

    Raises:
        ConfigError: A strategy is unknown, or the device has no peak for the workload's dtype.
    """
    asked = [
        Strategy.of(name, **SYSTEMS[name].those_of(options or {}))
        if name in SYSTEMS
        else Strategy.of(name, parallel=parallel, reshards=reshards)
        for name in strategies
    ]
    kept = default_reserve(hardware) if reserve is None else reserve
    finder = _Finder(workload, hardware, asked, checkpointing, kept)
    chosen, search, per_devices = finder.chosen()
    return Plan(
        workload=workload,
        hardware=hardware,
        parallel=parallel,
        reserve=kept,
        options=tuple(finder.rows(search)),
        recommended=chosen,
        per_devices=per_devices,
        exact=_exact(search, chosen),
        tight=finder.tight(chosen),
        interval=_interval(chosen, search, draws) if chosen and search and draws else None,
        improvements=tuple(finder.improvements(chosen, search)),
        largest=finder.largest(),
    )


class _Finder:
    """Searches for one workload, on any number of the machine's devices and with fewer tokens.

    It remembers each search.
    """

    def __init__(
        self,
        workload: Workload,
        hardware: HardwareProfile,
        strategies: Sequence[Strategy],
        checkpointing: bool | None,
        reserve: float,
    ) -> None:
        """Start with nothing searched; arguments are those of `plan`."""
        self._workload = workload
        self._hardware = hardware
        ours = [strategy for strategy in strategies if strategy.config is not None]
        self._presets = [strategy.name for strategy in ours]
        self._systems = [strategy for strategy in strategies if strategy.config is None]
        self._parallel = ours[0].parallel if ours else "ddp"
        self._reshards = not ours or ours[0].reshards
        self._checkpointing = checkpointing
        self._searches: dict[tuple[int, int, int], Search] = {}
        # Numbers of devices to look at: all, one host's, half of them, half of these, down to one.
        machines = [hardware]
        if hardware.num_hosts > 1:
            machines.append(replace(hardware, num_hosts=1, network=None))
        while (count := machines[-1].num_devices) > 1:
            machines.append(replace(machines[-1], num_devices=count // 2))
        self._planners = {
            machine.total_devices: Planner(machine, reserve=reserve) for machine in machines
        }
        # Steps to look at, those with most tokens first; none where weights exceed the device.
        is_hopeless = is_too_large(workload, hardware, self._parallel)
        self._works = [] if is_hopeless else [workload, *fewer_tokens(workload)]

    def _search(self, count: int, workload: Workload) -> Search:
        """Return the search for a step's tokens on so many devices."""
        key = (count, workload.batch_size * workload.accumulation, workload.sequence)
        if key not in self._searches:
            self._searches[key] = Search(
                workload,
                self._planners[count],
                names=self._presets,
                checkpointing=self._checkpointing,
                parallel=self._parallel,
                reshards=self._reshards,
            )
        return self._searches[key]

    def chosen(self) -> tuple[Option | None, Search | None, tuple[Option, ...]]:
        """Return the fastest option, its search, and the best one for each number of devices.

        Two numbers are compared: the most devices that fit, and one. Fewer tokens to a step are
        tried only where nothing fits with those asked for.
        """
        for workload in self._works:
            found: list[tuple[Option, Search]] = []
            for count in self._planners:
                if found and count > 1:
                    continue
                search = self._search(count, workload)
                best = search.best(names=self._presets)
                found += [] if best is None else [(best, search)]
            if found:
                chosen, search = max(found, key=lambda pair: pair[0].tokens_per_second)
                return chosen, search, tuple(option for option, _ in found)
        return None, None, ()

    def tight(self, chosen: Option | None) -> Option | None:
        """Return an option that leaves less than the reserve; None if there is no use for one.

        It has more tokens to a step than the chosen one, or any number if none is chosen.
        """
        least = chosen.need.workload.tokens_per_step if chosen else 0
        for workload in self._works:
            if workload.tokens_per_step <= least:
                return None
            for count in dict.fromkeys((self._hardware.total_devices, 1)):
                best = self._search(count, workload).best(names=self._presets, reserve=0.0)
                if best is not None:
                    return best
        return None

    def rows(self, search: Search | None) -> Iterable[Option]:
        """Yield the best option of each strategy, on as many devices as the recommended one."""
        if search is None:
            search = self._search(self._hardware.total_devices, self._workload)
        for name in self._presets:
            best = search.best(names=(name,)) or search.best(names=(name,), reserve=0.0)
            yield best or search.option(search.nearest(name))
        for system in self._systems:
            option = search.planner.fitted(search.workload, system)
            given = (f"{name}={value}" for name, value in system.options.items())
            yield replace(option, changes=(*given, *option.changes))

    def improvements(self, chosen: Option | None, search: Search | None) -> Iterable[Improvement]:
        """Yield changes of the machine that would help, those to make first at the front."""
        if chosen is not None and search is not None:
            yield from faster_parts(chosen, search)
            return
        works = self._works or [self._workload]
        # What one device needs, or where they share the model all of them.
        count = self._hardware.total_devices if self._parallel == "fsdp" else 1
        yield from more_memory([self._search(count, work) for work in works], self._presets)

    def largest(self) -> str | None:
        """Return the largest named model that one device trains; None if it trains this one."""
        if self._works:
            return None
        one, asked = self._planners[1], self._workload
        works = [
            Workload.of_config(
                *find_model(name), dtype=asked.dtype, sequence=asked.sequence, checkpointing=True
            )
            for name in model_names()
        ]
        for work in sorted(works, key=lambda work: -work.num_params):
            need = memory_of(work, "zero_offload", one.hardware)
            if not need.short_of(one.hardware, one.reserve):
                return work.name
        return None


def is_too_large(workload: Workload, hardware: HardwareProfile, parallel: str) -> bool:
    """Whether a device's weights alone exceed it."""
    parts = Division.of(parallel, hardware.total_devices).device
    return workload.model_bytes / parts > hardware.device.memory.value


def _interval(option: Option, search: Search, draws: int) -> Interval:
    """Return an interval of an option's tokens per second over draws of the machine's figures.

    The simulated step is scaled as its estimate moves from draw to draw: simulating each draw
    takes a hundred times as long.
    """
    usual = search.estimate(option)

    def tokens_per_second(drawn: HardwareProfile) -> float:
        return option.tokens_per_second * usual / search.estimate(option, drawn)

    machine = search.planner.hardware
    term = left_out_of(machine, search.workload)
    return interval_of(machine, tokens_per_second, count=draws, left_out=term)


def _exact(search: Search | None, chosen: Option | None) -> Option | None:
    """Return `Plan.exact`."""
    if search is None or chosen is None or chosen.strategy.name in EXACT:
        return None
    return search.best(names=EXACT)
