"""Plan: the setting to use on a machine, how fast it would be, and what would help.

Recommended are settings of this package's engine alone; other systems stand beside them. Nothing
is run: times are `sim.simulate`'s, memory is `sim.memory.need`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sim.fitting.uncertainty import Interval
from sim.hardware.profile import HardwareProfile
from sim.models.recomputation import Recomputation
from sim.models.workload import Workload
from sim.planning.asked import Asked
from sim.planning.choice import is_too_large
from sim.planning.chunks import in_chunks
from sim.planning.drives import zero_infinity
from sim.planning.improvements import Improvement
from sim.planning.instead import instead
from sim.planning.options import Option
from sim.planning.streams import hiding_tokens
from sim.planning.ways import Way
from sim.simulate import STRATEGIES, SYSTEMS, Strategy
from zenflow.host_state import GradientLink, HostState, SecondMoment, Uploads

DRAWS = 100
"""Number of draws of the machine's quantities for an interval."""
_NAMED = ("recommended", "likeliest", "exact", "tight")
"""Options of a plan that have a name of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Recommendation for a workload on a machine, alternatives, upgrades. See `plan`."""

    workload: Workload
    """Model and tokens of a step, as asked for."""
    hardware: HardwareProfile
    """Machine with all its devices."""
    parallel: str
    """Way in which devices share the model, one of `sim.timing.division.PARALLELS`."""
    reserve: float
    """Bytes that stay free on each device and on the host."""
    options: tuple[Option, ...]
    """Best option of each preset of the engine, then of each other system."""
    recommended: Option | None
    """Option to use; None if no preset of the engine is likely to fit. Its layers visit the
    device, or its states are on a drive, only where nothing else is likely to fit."""
    likeliest: Option | None
    """Option of weights on the device that is the likeliest to fit, where none is likely enough;
    None if one is, or if none may fit. One in chunks may be less likely by `AS_LIKELY`."""
    per_devices: tuple[Option, ...]
    """Best option for each number of devices that was compared, most devices first."""
    exact: Option | None
    """Fastest option whose rule is AdamW exactly.

    None if the recommended option's rule is, or if none fits."""
    tight: Option | None
    """Option that is less likely to fit than the one that is shown, and faster or with more tokens
    to a step; None if there is none."""
    interval: Interval | None
    """Interval of the shown option's tokens per second; None if no draws were asked for, or if
    layers visit the device or states are on a drive."""
    improvements: tuple[Improvement, ...]
    """Changes of the machine that would help, those to make first at the front."""
    without_compact: tuple[Improvement, ...] | None = None
    """Changes of the machine with which float32 state on the host would fit.

    None unless compact state was tried because nothing else fits."""
    without_chunks: Option | None = None
    """Option with whole logits; None unless a loss in chunks was found to be better."""
    streamed: Option | None = None
    """Option whose layers visit the device.

    None unless this is likely to fit one device, and is faster than the option that is shown,
    takes more tokens to a step, or nothing else is likely to fit."""
    hiding_tokens: int | None = None
    """Least tokens of a micro-batch that hide the visits of the streamed option's layers."""
    on_drive: Option | None = None
    """Option whose states are on the machine's drives.

    None unless asked for, or likely to fit one device where states in memory are not, are rounded,
    or take fewer tokens to a step than were asked for."""
    zero_infinity: Option | None = None
    """Step of ZeRO-Infinity for that option's workload; None where there is no such option."""
    other_way: Option | None = None
    """Best option under the other way to share the model, `Plan.parallel` being the better one;
    None if that was not looked at, or if nothing may fit there."""
    instead: tuple[Option, ...] = ()
    """Other systems that fit one device, where the shown option waits, rounds, may not fit, or is
    slower."""
    largest: str | None = None
    """Largest smaller model of the table that one device trains; None if something is
    recommended."""

    @property
    def needs_sharding(self) -> bool:
        """Whether a device's weights alone exceed it."""
        return is_too_large(self.workload, self.hardware, self.parallel)

    @property
    def shown(self) -> Option | None:
        """The recommended option, else the likeliest one; None if nothing may fit."""
        return self.recommended or self.likeliest

    @property
    def has_fewer_tokens(self) -> bool:
        """Whether the option that is shown has fewer tokens to a step than were asked for."""
        chosen = self.shown
        if chosen is None:
            return False
        return chosen.need.workload.tokens_per_step < self.workload.tokens_per_step

    def option(self, name: str) -> Option:
        """Return a strategy's option."""
        return next(option for option in self.options if option.strategy.name == name)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        named = {name: getattr(self, name) for name in _NAMED}
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
            "without_compact": None
            if self.without_compact is None
            else [item.to_dict() for item in self.without_compact],
            "without_chunks": self.without_chunks and self.without_chunks.to_dict(),
            "streamed": self.streamed and self.streamed.to_dict(),
            "hiding_tokens": self.hiding_tokens,
            "on_drive": self.on_drive and self.on_drive.to_dict(),
            "zero_infinity": self.zero_infinity and self.zero_infinity.to_dict(),
            "other_way": self.other_way and self.other_way.to_dict(),
            "instead": [option.to_dict() for option in self.instead],
        }


def plan(
    workload: Workload,
    hardware: HardwareProfile,
    *,
    strategies: Sequence[str] = STRATEGIES,
    checkpointing: Recomputation | None = None,
    reserve: float | None = None,
    draws: int = DRAWS,
    parallel: str | None = None,
    reshards: bool = True,
    options: Mapping[str, Any] | None = None,
    host_state: HostState | None = None,
    gradient_link: GradientLink = "model",
    uploads: Uploads = "all",
    second_moment: SecondMoment = "element",
    chunked_loss: bool | None = None,
    streams: bool | None = None,
    state_on_drive: bool | None = None,
) -> Plan:
    """Return the setting to use for a workload on a machine, and the alternatives.

    Args:
        workload: Model, and tokens of a step on each device; how these are cut into micro-batches
            is searched.
        hardware: The machine. Fewer of its devices are looked at too.
        strategies: Names of presets and of other systems to look at.
        checkpointing: What backward recomputes; None tries all and nothing.
        reserve: Bytes to leave free on each device and on the host; None is the default.
        draws: Number of draws of uncertain quantities for the interval; 0 makes none.
        parallel: How devices share the model, one of `sim.timing.division.PARALLELS`. None is the
            better way: whole weights unless sharding fits better, or is faster.
        reshards: Whether sharded weights are dropped behind forward.
        options: Options of other systems, of which each takes those that it has.
        host_state: Format of the host's weights and moments under zenflow. None is float32, and
            compact where nothing may fit with that.
        gradient_link: Format of gradients on the link and on the host under zenflow.
        uploads: Weights that are uploaded under zenflow.
        second_moment: Second moments under zenflow.
        chunked_loss: Whether logits are never whole, as under `zenflow train --chunked-loss`.
            None is the workload's loss, and chunks where they make that fit or faster.
        streams: Whether layers may visit the device. True tells so in any case, None only where
            that is faster, fits surely, or takes more tokens to a step.
        state_on_drive: Whether states may be on a drive. True tells so in any case, None only
            where the host has too little memory.

    Raises:
        ConfigError: A strategy is unknown, the device has no peak for the workload's dtype, or
            `zenflow train` has no loss in chunks for the model.

    Examples:
        >>> from sim.hardware.catalog import find_machine
        >>> from sim.models.table import find_model
        >>> workload = Workload.of_config(*find_model("gpt2"), batch_size=2, sequence=128)
        >>> found = plan(workload, find_machine("hgx-h100", 1), strategies=("on_device",), draws=0)
        >>> found.shown.label
        'on_device'
    """
    asked = Asked(
        workload=in_chunks(workload) if chunked_loss else workload,
        hardware=hardware,
        strategies=tuple(
            Strategy.of(name, **SYSTEMS[name].those_of(options or {}))
            if name in SYSTEMS
            else Strategy.of(name, parallel=parallel or "ddp", reshards=reshards)
            for name in strategies
        ),
        checkpointing=checkpointing, reserve=reserve, parallel=parallel, reshards=reshards,
        host_state=host_state, gradient_link=gradient_link, uploads=uploads,
        second_moment=second_moment, chunked_loss=chunked_loss, streams=streams,
        state_on_drive=state_on_drive,
    )  # fmt: skip
    found, other = asked.ways()
    streamed = asked.streamed(found)
    on_drive = asked.on_drive(found, found.choice.recommended or streamed or found.choice.shown)
    return _plan_of(asked, found, other, streamed, on_drive, draws)


def _plan_of(
    asked: Asked,
    found: Way,
    other: Way | None,
    streamed: Option | None,
    on_drive: Option | None,
    draws: int,
) -> Plan:
    """Return the plan that tells the options that were found."""
    choice, beside, one = found.choice, found.beside, found.one
    sure = choice.recommended or streamed or on_drive
    # Where nothing is likely to fit, memory that is sold makes whole logits fit too.
    upgrades = found.whole if choice.recommended is None else beside
    return Plan(
        workload=asked.workload,
        hardware=asked.hardware,
        parallel=found.parallel,
        reserve=found.chooser.reserve,
        options=tuple(beside.rows(asked.presets, asked.systems, asked.checkpointing)),
        recommended=sure,
        likeliest=choice.likeliest,
        per_devices=choice.per_devices,
        exact=found.exact,
        tight=found.tight(sure),
        interval=found.interval(draws) if sure in (None, choice.recommended) else None,
        improvements=tuple(
            upgrades.improvements(asked.presets, found.parallel, sure or choice.shown)
        ),
        without_compact=found.without_compact,
        without_chunks=found.without_chunks,
        streamed=streamed,
        hiding_tokens=None
        if streamed is None
        else hiding_tokens(streamed.need, one.costs(streamed.need.workload)),
        on_drive=on_drive,
        zero_infinity=None if on_drive is None else zero_infinity(one, on_drive),
        other_way=None if other is None else other.choice.shown,
        instead=tuple(
            instead(
                one, asked.workload, sure or choice.shown, recomputes=asked.checkpointing is None
            )
        ),
        largest=beside.largest() if sure is None else None,
    )
