"""Plan: which setting to use on a machine, how fast it would be, and what would help.

Only what this package's engine runs is recommended; other systems stand beside it. Nothing is run:
times are `sim.simulate`'s, memory is `sim.memory`'s. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sim.hardware import HardwareProfile
from sim.improvements import Improvement, faster_parts, more_memory
from sim.memory import memory_of
from sim.models import find_model, model_names
from sim.options import Option, Planner, default_reserve
from sim.rules import EXACT
from sim.search import Search, fewer_tokens
from sim.simulate import STRATEGIES, Strategy
from sim.uncertainty import Interval, interval_of
from sim.workload import Workload
from zenflow.config import PRESETS

DRAWS = 100
"""Of uncertain figures, for an interval."""
_FASTER = 1.05
"""How many times as fast a setting of another rule must be to be named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a machine can do for a workload."""

    workload: Workload
    """As asked for."""
    hardware: HardwareProfile
    reserve: float
    """Bytes that stay free on each device and on the host."""
    options: tuple[Option, ...]
    """Each preset of the engine as it does best, then other systems."""
    recommended: Option | None
    """None if no preset of the engine fits."""
    per_devices: tuple[Option, ...]
    """The best for each number of the machine's devices that was looked at, most devices first."""
    exact: Option | None
    """The fastest whose rule is AdamW exactly, where the recommended one's is not."""
    window: Option | None
    """A faster one with moments of windows' means, which changes accuracy; else None."""
    tight: Option | None
    """One with more tokens to a step, or any, for which less than the reserve is left; or None."""
    interval: Interval | None
    """Of the recommended one's tokens per second."""
    improvements: tuple[Improvement, ...]
    """Changes of the machine, those to make first at the front."""
    largest: str | None = None
    """The largest model of the table that fits, where this one's weights exceed a device."""

    @property
    def needs_sharding(self) -> bool:
        """Whether the weights alone exceed a device."""
        return self.workload.model_bytes > self.hardware.device.memory.value

    @property
    def has_fewer_tokens(self) -> bool:
        """Whether what is recommended takes fewer tokens to a step than asked for."""
        chosen = self.recommended
        if chosen is None:
            return False
        return chosen.need.workload.tokens_per_step < self.workload.tokens_per_step

    def option(self, name: str) -> Option:
        """Return a strategy's option."""
        return next(option for option in self.options if option.strategy.name == name)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        found = {
            name: None if option is None else option.to_dict()
            for name, option in (
                ("recommended", self.recommended),
                ("exact", self.exact),
                ("window", self.window),
                ("tight", self.tight),
            )
        }
        told = self.interval
        return {
            "model": self.workload.name,
            "num_params": self.workload.num_params,
            "machine": self.hardware.name,
            "num_devices": self.hardware.num_devices,
            "batch_size": self.workload.batch_size,
            "sequence": self.workload.sequence,
            "accumulation": self.workload.accumulation,
            "dtype": self.workload.dtype,
            "reserve": self.reserve,
            "needs_sharding": self.needs_sharding,
            "largest": self.largest,
            **found,
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
) -> Plan:
    """Return what a machine can do for a workload.

    Args:
        workload: Model, and tokens of a step on each device; how these are cut into micro-batches
            is searched.
        hardware: The machine. Fewer of its devices are looked at too.
        strategies: Which to look at, by name.
        checkpointing: Whether backward recomputes activations; None tries both.
        reserve: Bytes to leave free on each device and on the host; None is `default_reserve`.
        draws: Of uncertain figures, for the interval; 0 is none.

    Raises:
        ConfigError: A strategy is unknown, or the device has no peak for the workload's dtype.
    """
    strategies = [Strategy.of(name).name for name in strategies]
    kept = default_reserve(hardware) if reserve is None else reserve
    finder = _Finder(workload, hardware, strategies, checkpointing, kept)
    chosen, per_devices = finder.chosen()
    search = finder.search(chosen.need.num_devices, _asked_of(chosen)) if chosen else None
    exact, window = _others(search, chosen)
    return Plan(
        workload=workload,
        hardware=hardware,
        reserve=kept,
        options=tuple(finder.rows(search)),
        recommended=chosen,
        per_devices=per_devices,
        exact=exact,
        window=window,
        tight=finder.tight(chosen),
        interval=interval(chosen, search, draws) if chosen and search else None,
        improvements=tuple(finder.improvements(chosen, search)),
        largest=finder.largest(),
    )


def interval(option: Option, search: Search, draws: int = DRAWS) -> Interval | None:
    """Return an interval of an option's tokens per second over draws of the machine's figures.

    The simulated step is scaled as its estimate moves from draw to draw, which takes a hundredth of
    the time of simulating each.
    """
    if not draws:
        return None
    usual = search.estimate(option)

    def tokens_per_second(drawn: HardwareProfile) -> float:
        return option.tokens_per_second * usual / search.estimate(option, drawn)

    return interval_of(search.planner.hardware, tokens_per_second, count=draws)


def _others(search: Search | None, chosen: Option | None) -> tuple[Option | None, Option | None]:
    """Return the fastest exact option, and a faster one with window moments."""
    if search is None or chosen is None:
        return None, None
    exact = None if chosen.strategy.name in EXACT else search.best(names=EXACT)
    window = search.best(names=("zenflow",), moments="window")
    if window is not None and window.step_seconds * _FASTER > chosen.step_seconds:
        window = None
    return exact, window


def _asked_of(option: Option) -> Workload:
    """Return the step of an option in one micro-batch, without what the search has changed."""
    work = option.need.workload
    return replace(work, batch_size=work.batch_size * work.accumulation, accumulation=1)


class _Finder:
    """Searches for one workload over numbers of devices and of tokens; remembers each."""

    def __init__(
        self,
        workload: Workload,
        hardware: HardwareProfile,
        strategies: Sequence[str],
        checkpointing: bool | None,
        reserve: float,
    ) -> None:
        self._workload = workload
        self._hardware = hardware
        self._presets = [name for name in strategies if name in PRESETS]
        self._systems = [name for name in strategies if name not in PRESETS]
        self._checkpointing = checkpointing
        self._reserve = reserve
        self._searches: dict[tuple[int, int, int], Search] = {}
        self._planners: dict[int, Planner] = {}
        self._is_hopeless = workload.model_bytes > hardware.device.memory.value

    def search(self, count: int, workload: Workload) -> Search:
        """Return the search for a step's tokens on so many devices."""
        sequences = workload.batch_size * workload.accumulation
        key = (count, sequences, workload.sequence)
        if key not in self._searches:
            if sequences == self._workload.batch_size * self._workload.accumulation:
                workload = replace(self._workload, sequence=workload.sequence)
            else:
                workload = replace(workload, checkpointing=self._workload.checkpointing)
            self._searches[key] = Search(
                workload,
                self._planner(count),
                names=self._presets,
                checkpointing=self._checkpointing,
            )
        return self._searches[key]

    def _planner(self, count: int) -> Planner:
        if count not in self._planners:
            machine = replace(self._hardware, num_devices=count)
            self._planners[count] = Planner(machine, reserve=self._reserve)
        return self._planners[count]

    @property
    def _counts(self) -> list[int]:
        """Numbers of devices: all, halves of it, and one."""
        counts = [self._hardware.num_devices]
        while counts[-1] > 1:
            counts.append(counts[-1] // 2)
        return counts

    def chosen(self) -> tuple[Option | None, tuple[Option, ...]]:
        """Return the fastest option, and the best for the numbers of devices looked at.

        All devices and one; where all don't fit, as many as do. With fewer tokens to a step only
        where nothing fits with those asked for.
        """
        if self._is_hopeless:
            return None, ()
        for workload in (self._workload, *fewer_tokens(self._workload)):
            found: list[Option] = []
            for count in self._counts:
                if found and count > 1:
                    continue
                best = self.search(count, workload).best(names=self._presets)
                found += [] if best is None else [best]
            if found:
                return max(found, key=lambda option: option.tokens_per_second), tuple(found)
        return None, ()

    def tight(self, chosen: Option | None) -> Option | None:
        """Return what may fit with more tokens to a step than what is chosen, or any if none is."""
        if self._is_hopeless:
            return None
        least = chosen.need.workload.tokens_per_step if chosen else 0
        for workload in (self._workload, *fewer_tokens(self._workload)):
            if workload.tokens_per_step <= least:
                return None
            for count in dict.fromkeys((self._hardware.num_devices, 1)):
                best = self.search(count, workload).best(names=self._presets, reserve=0.0)
                if best is not None:
                    return best
        return None

    def rows(self, search: Search | None) -> Iterable[Option]:
        """Yield every strategy as it does best where the recommended one runs."""
        if search is None:
            search = self.search(self._hardware.num_devices, self._workload)
        for name in self._presets:
            best = search.best(names=(name,)) or search.best(names=(name,), reserve=0.0)
            yield best or search.option(search.nearest(name))
        for name in self._systems:
            yield search.planner.fitted(search.workload, Strategy.of(name))

    def improvements(self, chosen: Option | None, search: Search | None) -> Iterable[Improvement]:
        """Return what would help, first things first."""
        if chosen is not None and search is not None:
            yield from faster_parts(chosen, search)
            return
        works = [self._workload, *([] if self._is_hopeless else fewer_tokens(self._workload))]
        yield from more_memory([self.search(1, work) for work in works], self._presets)

    def largest(self) -> str | None:
        """Return the largest named model that one device trains, if this one can't be."""
        if not self._is_hopeless:
            return None
        machine, asked = replace(self._hardware, num_devices=1), self._workload
        works = [
            Workload.of_config(
                *find_model(name), dtype=asked.dtype, sequence=asked.sequence, checkpointing=True
            )
            for name in model_names()
        ]
        for work in sorted(works, key=lambda work: -work.num_params):
            if not memory_of(work, "zero_offload", machine).short_of(machine, self._reserve):
                return work.name
        return None
