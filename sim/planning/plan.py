"""Plan: which setting to use on a machine, how fast it would be, and what would help.

Only what this package's engine runs is recommended; other systems stand beside it. Nothing is run:
times are `sim.simulate`'s, memory is `sim.memory.need`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sim.fitting.uncertainty import Interval, interval_of
from sim.hardware.profile import HardwareProfile
from sim.models.workload import Workload
from sim.planning.finder import Finder
from sim.planning.improvements import Improvement
from sim.planning.options import Option, default_reserve
from sim.planning.rules import EXACT
from sim.planning.search import Search
from sim.simulate import STRATEGIES, Strategy

DRAWS = 100
"""Number of draws of the machine's uncertain figures for an interval."""
_FASTER = 1.05
"""Speed-up that a setting with window moments must bring to be named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a machine can do for a workload."""

    workload: Workload
    """Model and tokens of a step, as asked for."""
    hardware: HardwareProfile
    """Machine with all its devices."""
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
    window: Option | None
    """Faster option with moments of windows' means, which changes accuracy; None if there is
    none."""
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
        """Whether the weights alone exceed a device."""
        return self.workload.model_bytes > self.hardware.device.memory.value

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
        strategies: Names of presets and of other systems to look at.
        checkpointing: Whether backward recomputes activations; None tries both.
        reserve: Bytes to leave free on each device and on the host; None is `default_reserve`.
        draws: Number of draws of uncertain figures for the interval; 0 makes none.

    Raises:
        ConfigError: A strategy is unknown, or the device has no peak for the workload's dtype.
    """
    strategies = [Strategy.of(name).name for name in strategies]
    kept = default_reserve(hardware) if reserve is None else reserve
    finder = Finder(workload, hardware, strategies, checkpointing, kept)
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

    The simulated step is scaled as its estimate moves from draw to draw: simulating each draw
    takes a hundred times as long.
    """
    if not draws:
        return None
    usual = search.estimate(option)

    def tokens_per_second(drawn: HardwareProfile) -> float:
        return option.tokens_per_second * usual / search.estimate(option, drawn)

    return interval_of(search.planner.hardware, tokens_per_second, count=draws)


def _others(search: Search | None, chosen: Option | None) -> tuple[Option | None, Option | None]:
    """Return `Plan.exact` and `Plan.window`."""
    if search is None or chosen is None:
        return None, None
    exact = None if chosen.strategy.name in EXACT else search.best(names=EXACT)
    window = search.best(names=("zenflow",), moments="window")
    if window is not None and window.step_seconds * _FASTER > chosen.step_seconds:
        window = None
    return exact, window


def _asked_of(option: Option) -> Workload:
    """Return the step of an option as one micro-batch."""
    work = option.need.workload
    return replace(work, batch_size=work.batch_size * work.accumulation, accumulation=1)
