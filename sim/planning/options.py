"""Options: a strategy's settings on a machine, their memory and their speed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from sim.hardware.profile import HardwareProfile
from sim.memory.chance import LIKELY
from sim.memory.engine import EngineMemory, engine_memory
from sim.memory.need import MemoryNeed, Shortfall, memory_of
from sim.memory.saved import checkpoint_bytes
from sim.models.workload import Workload
from sim.planning.accumulated import accumulated
from sim.planning.rules import WORTH, distance, rule_of
from sim.simulate import Prediction, Strategy
from sim.steady import steady
from sim.timing.costs import StepCosts, costs_of
from sim.timing.division import Division
from zenflow.config import ZenFlowConfig

_MEASURED = 2
"""Number of steps to simulate where steps repeat; whole windows are simulated in any case."""
_LEAST_RESERVE = float(1 << 30)
"""Bytes of the smallest default reserve."""
_RESERVED = 0.05
"""Default reserve's share of a device's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One strategy on a machine, with its memory and its predicted step. See `Planner`."""

    strategy: Strategy
    changes: tuple[str, ...] = ()
    """Differences from the preset and from the workload that was asked for, in words."""
    need: MemoryNeed
    """Memory that it needs, with the workload and the number of devices that it is for."""
    shortfalls: tuple[Shortfall, ...]
    """Places whose memory is too small; empty if the option may fit."""
    is_tight: bool = False
    """Whether it leaves less memory than the reserve, or is not likely enough to fit."""
    chance: float | None = None
    """Chance that a device fits it; None for a CPU, which has no memory of its own."""
    prediction: Prediction | None
    """Prediction of a step; None where it can't fit."""

    @property
    def fits(self) -> bool:
        """Whether the option is likely to fit, and the reserve besides."""
        return not self.shortfalls and not self.is_tight

    @property
    def may_fit(self) -> bool:
        """Whether the prediction fits, but with too little memory to be sure."""
        return not self.shortfalls and self.is_tight

    @property
    def is_ours(self) -> bool:
        """Whether the engine of this package runs it."""
        return self.strategy.config is not None

    @property
    def rule(self) -> str:
        """Update rule in words; it decides accuracy."""
        return rule_of(self.strategy)

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of a step; infinite without a prediction."""
        return self.prediction.step_seconds if self.prediction else float("inf")

    @property
    def tokens(self) -> int:
        """Number of tokens of a step over all devices."""
        return self.need.num_devices * self.need.workload.tokens_per_step

    @property
    def tokens_per_second(self) -> float:
        """Predicted tokens per second over all devices; 0 without a prediction."""
        return self.tokens / self.step_seconds

    @property
    def worth(self) -> float:
        """Tokens per second of the engine, over `WORTH` for each unit of distance from AdamW."""
        return self.tokens_per_second / WORTH ** distance(self.strategy)

    @property
    def label(self) -> str:
        """The strategy's name with what is changed."""
        return ", ".join([self.strategy.name, *self.changes])

    @property
    def checkpoint_bytes(self) -> int | None:
        """Bytes of a checkpoint of `zenflow train`, for all devices together; None for others."""
        config, work = self.strategy.config, self.need.workload
        if config is None:
            return None
        shapes = [p.shape for p in work.parameters]
        on_drive = self.strategy.state_on_drive  # where a checkpoint copies none
        memory = engine_memory(shapes, config, work.dtype_bytes, on_drive=on_drive)
        return checkpoint_bytes(memory, by_ranks=self.need.num_devices > 1)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        work, config = self.need.workload, self.strategy.config
        return {
            "strategy": self.strategy.name,
            "is_ours": self.is_ours,
            "changes": list(self.changes),
            "batch_size": work.batch_size,
            "accumulation": work.accumulation,
            "sequence": work.sequence,
            "checkpointing": work.checkpointing,
            "chunked_loss": work.loss == "chunks",
            "streams": None
            if self.strategy.streams is None
            else {"resident_layers": self.strategy.streams.resident_layers},
            "state_on_drive": self.strategy.state_on_drive,
            "config": None if config is None else config.to_dict(),
            "queue_depth": self.need.queue_depth,
            "rule": self.rule,
            "fits": self.fits,
            "may_fit": self.may_fit,
            "chance_to_fit": self.chance,
            "tokens_per_second": self.tokens_per_second,
            "prediction": self.prediction.to_dict() if self.prediction else None,
            "memory": self.need.to_dict(),
            "checkpoint_bytes": self.checkpoint_bytes,
            "shortfalls": [shortfall.to_dict() for shortfall in self.shortfalls],
        }


def default_reserve(hardware: HardwareProfile) -> float:
    """Return the bytes to leave free: 1 GiB or a twentieth of the device's memory, if more.

    A display, the allocator's fragments and what a model of memory leaves out take some of it.
    """
    return max(_LEAST_RESERVE, _RESERVED * hardware.device.memory.value)


class Planner:
    """Checks and simulates strategies on one machine, and remembers its predictions.

    Attributes:
        hardware: The machine.
        reserve: Bytes that have to stay free on the device and on the host.
        chance: Least chance to fit the device.
        memories: One device's part of the engine's memory, by its settings and its share.

    Examples:
        >>> from sim.hardware.catalog import find_machine
        >>> from sim.models.table import find_model
        >>> workload = Workload.of_config(*find_model("gpt2"))
        >>> planner = Planner(find_machine("hgx-h100", 1))
        >>> option = planner.option(workload, Strategy.of("on_device"))
        >>> option.fits, option.rule
        (True, 'AdamW exactly')
    """

    def __init__(
        self, hardware: HardwareProfile, *, reserve: float = 0.0, chance: float = LIKELY
    ) -> None:
        """Start with no predictions."""
        self.hardware = hardware
        self.reserve = reserve
        self.chance = chance
        self.memories: dict[tuple[ZenFlowConfig, Division], EngineMemory] = {}
        self._costs: dict[tuple[Any, ...], StepCosts] = {}
        self._known: dict[tuple[Any, ...], Prediction] = {}

    def fitted(self, workload: Workload, strategy: Strategy, *, recomputes: bool = True) -> Option:
        """Return a strategy with no more changes than it takes to fit the device.

        Checkpointing first, then micro-batches of half the size: both compute the same step.

        Args:
            workload: Step as asked for.
            strategy: Preset or other system.
            recomputes: Whether checkpointing may be changed.
        """
        where = "host" if self.hardware.device.is_cpu else "device"
        for smaller, changes in variants(workload, recomputes=recomputes):
            short = memory_of(smaller, strategy, self.hardware).short_of(
                self.hardware, self.reserve, self.chance
            )
            if where not in short:
                return replace(self.option(smaller, strategy), changes=changes)
        return self.option(workload, strategy)

    def option(self, workload: Workload, strategy: Strategy) -> Option:
        """Return a strategy for a workload without changes, predicted if it may fit."""
        return self.option_of(self.need(workload, strategy))

    def need(self, workload: Workload, strategy: Strategy) -> MemoryNeed:
        """Return the memory that a strategy needs for a workload on the machine."""
        return memory_of(workload, strategy, self.hardware)

    def option_of(self, need: MemoryNeed, hardware: HardwareProfile | None = None) -> Option:
        """Return the option with this need, predicted if it may fit.

        Args:
            need: Memory that a strategy needs for a workload.
            hardware: The same machine with other memory; None takes it as it is.
        """
        machine = hardware or self.hardware
        shortfalls = tuple(need.fits(machine))
        return Option(
            strategy=need.strategy,
            need=need,
            shortfalls=shortfalls,
            is_tight=bool(need.short_of(machine, self.reserve, self.chance)),
            chance=need.chance(machine),
            prediction=None if shortfalls else self.predict(need),
        )

    def costs(self, workload: Workload) -> StepCosts:
        """Return the costs of a workload's step on the machine."""
        key = _key(workload)
        if key not in self._costs:
            self._costs[key] = costs_of(workload, self.hardware)
        return self._costs[key]

    def predict(self, need: MemoryNeed) -> Prediction:
        """Return the step of a strategy with this need, as if there were memory for it."""
        workload, strategy = need.workload, need.strategy
        if strategy.config is not None:  # on a machine with other memory other numbers may wait
            config = replace(strategy.config, queue_depth=need.queue_depth)
            strategy = replace(strategy, config=config)
        how = (strategy.name, strategy.parallel, strategy.reshards, str(strategy.options))
        streams = str(strategy.streams)
        key = (*_key(workload), *how, streams, strategy.state_on_drive, strategy.config)
        if key not in self._known:
            # One window is enough where steps repeat; with a lag in between they take longer to.
            repeats = strategy.config is None or strategy.config.effective_lag() <= 1

            def predict(count: int) -> Prediction:
                costs = self.costs(replace(workload, accumulation=count))
                return steady(costs, strategy, num_steps=_MEASURED if repeats else None)

            # C code replays the plain engine on one device.
            is_plain = strategy.config is not None and strategy.streams is None
            is_replayed = is_plain and not strategy.state_on_drive
            self._known[key] = accumulated(
                predict, workload.accumulation,
                is_replayed=is_replayed and self.hardware.total_devices == 1,
            )  # fmt: skip
        return self._known[key]


def _key(workload: Workload) -> tuple[Any, ...]:
    """Return a key that tells workloads of one plan apart; comparing all layers takes long.

    A loss in chunks takes as long as one of whole logits.
    """
    work = workload
    size = (work.batch_size, work.sequence, work.accumulation, work.checkpointing)
    return (*size, work.name, work.num_params, work.dtype)


def variants(
    workload: Workload, *, recomputes: bool = True
) -> list[tuple[Workload, tuple[str, ...]]]:
    """Return the workload, then the same step in less and less device memory, each in words.

    Args:
        workload: Step as asked for.
        recomputes: Whether checkpointing may be changed.
    """
    changes: tuple[str, ...] = ()
    found = [(workload, changes)]
    if recomputes and not workload.recomputes_all:
        workload, changes = replace(workload, checkpointing=True), ("checkpointing",)
        found.append((workload, changes))
    while workload.batch_size % 2 == 0:
        size, count = workload.batch_size // 2, workload.accumulation * 2
        workload = replace(workload, batch_size=size, accumulation=count)
        found.append((workload, (*changes, f"{count} micro-batches of {size}")))
    return found
