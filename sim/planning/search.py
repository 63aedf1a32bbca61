"""Search: the engine's fastest settings for one step's tokens on a machine.

Micro-batches, checkpointing, k and S are searched together; as many gradients wait on the host as
it has room for. Estimates put the settings in order. Those that fit are simulated in this order,
until none that is left promises more than the best of them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from sim.hardware.profile import HardwareProfile
from sim.memory.engine import EngineMemory, engine_memory
from sim.memory.need import MemoryNeed, memory_of
from sim.models.recomputation import Recomputation
from sim.models.workload import Workload
from sim.planning.estimates import estimated_seconds
from sim.planning.options import Option, Planner
from sim.planning.rules import BASELINES, WORTH, distance
from sim.simulate import Strategy
from sim.timing.costs import StepCosts, costs_of
from zenflow.config import PRESETS, ZenFlowConfig

_AS_GOOD = 0.01
"""Share of a step by which a setting may be slower and still count as equally good."""
_MOST = 8
"""Largest number of settings that are simulated for one answer."""
KS = (0.1, 0.0, 0.01, 0.02, 0.05, 0.2, 0.3, 0.45, 0.6, 0.8)
"""Values of k that are tried, the default first: it stays where nothing is faster."""
INTERVALS = (4, 8, 16)
"""Values of S that are tried, in steps."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedSetting:
    """One setting of the grid."""

    workload: Workload
    """Step, cut into this setting's micro-batches."""
    strategy: Strategy
    """Preset with this setting's knobs."""
    changes: tuple[str, ...]
    """Differences from the preset and from the workload that was asked for, in words."""
    seconds: float
    """Estimate of a step's seconds, which the simulated step is never below."""
    distance: int
    """Distance of the update rule from AdamW; see `sim.planning.rules.distance`."""

    @property
    def score(self) -> float:
        """Seconds of a step, times `WORTH` for each unit of distance from AdamW."""
        return self.seconds * WORTH**self.distance


class Search:
    """The engine's settings for the tokens of one step, on one machine."""

    def __init__(
        self,
        workload: Workload,
        planner: Planner,
        *,
        names: Collection[str] = PRESETS,
        checkpointing: bool | None = None,
        parallel: str = "ddp",
        reshards: bool = True,
    ) -> None:
        """Put all settings in order.

        Args:
            workload: Model, and tokens of a step on each device.
            planner: Simulates settings on the machine, and remembers what it has simulated.
            names: Presets to look at.
            checkpointing: Whether backward recomputes; None tries both.
            parallel: How devices share the model, one of `sim.timing.division.PARALLELS`.
            reshards: Whether sharded weights are dropped behind forward.
        """
        self.planner = planner
        self.workload = workload
        self._shapes = tuple(parameter.shape for parameter in workload.parameters)
        self._needs: dict[tuple[PlannedSetting, int, bool], MemoryNeed] = {}
        recomputes = (False, True) if checkpointing is None else (checkpointing,)
        strategies = [
            (replace(strategy, parallel=parallel, reshards=reshards), changes)
            for strategy, changes in _strategies(names, releases=workload.dtype != "float16")
        ]
        made = [
            PlannedSetting(
                workload=work,
                strategy=strategy,
                changes=(*changes, *_changes_of(work, workload)),
                seconds=self._seconds(planner.costs(work), strategy),
                distance=distance(strategy),
            )
            for work in _splits(workload, recomputes)
            for strategy, changes in strategies
        ]
        self._ordered = sorted(made, key=lambda item: item.score)

    def best(
        self,
        *,
        names: Collection[str] = PRESETS,
        reserve: float | None = None,
        hardware: HardwareProfile | None = None,
    ) -> Option | None:
        """Return the best setting that fits; None if none does.

        A rule that is farther from AdamW by 1 has to be `WORTH` times as fast. Of equally good
        settings the one with the fewest changes is taken. Baselines are taken only where they are
        all that is asked for, or all that fits.

        Args:
            names: Presets to choose from.
            reserve: Bytes to leave free; None takes the planner's.
            hardware: The same machine with other memory; None takes it as it is.
        """
        first = [name for name in names if name not in BASELINES]
        for group in (first, [name for name in names if name in BASELINES]):
            found = self._best(group, reserve, hardware)
            if found is not None:
                return self.option(found, reserve, hardware)
        return None

    def _best(
        self, names: Collection[str], reserve: float | None, hardware: HardwareProfile | None
    ) -> PlannedSetting | None:
        scores: dict[PlannedSetting, float] = {}
        for item in self.fitting(names, reserve, hardware):
            best = min(scores.values(), default=math.inf)
            if len(scores) == _MOST or item.score >= best * (1 - _AS_GOOD):
                break
            need = self.need(item, reserve, hardware)
            taken = self.planner.predict(need).step_seconds
            scores[item] = taken * WORTH**item.distance
        if not scores:
            return None
        most = min(scores.values()) * (1 + _AS_GOOD)
        good = [item for item, score in scores.items() if score <= most]
        return min(
            good,
            key=lambda item: (len(item.changes), item.distance, self.need(item).device_bytes),
        )

    def option(
        self,
        item: PlannedSetting,
        reserve: float | None = None,
        hardware: HardwareProfile | None = None,
    ) -> Option:
        """Return a setting as an option; arguments are as in `best`."""
        need = self.need(item, reserve, hardware)
        found = self.planner.option_of(need, hardware)
        config, changes = need.strategy.config, item.changes
        if config is not None and config.queue_depth is not None:
            changes = (*changes, f"queue_depth={config.queue_depth}")
        return replace(found, changes=changes)

    def fitting(
        self,
        names: Collection[str] = PRESETS,
        reserve: float | None = None,
        hardware: HardwareProfile | None = None,
    ) -> Iterator[PlannedSetting]:
        """Yield the settings that fit, those that promise most first; arguments are as in `best`.

        A setting is left out unseen where its neighbours tell that it can't fit. More columns on
        the device never need less of its memory, nor more of the host's; micro-batches and
        checkpointing concern the device's alone.
        """
        machine = hardware or self.planner.hardware
        kept = self.planner.reserve if reserve is None else reserve
        most_k: dict[tuple[str, int, int, Recomputation], float] = {}
        least_k: dict[tuple[str, int], float] = {}
        for item in self._ordered:
            config = item.strategy.config
            assert config is not None
            name, k = item.strategy.name, config.topk_ratio
            if name not in names:
                continue
            interval, work = config.update_interval, item.workload
            device = (name, interval, work.batch_size, work.checkpointing)
            host = (name, interval)
            if k >= most_k.get(device, 2.0) or k <= least_k.get(host, -1.0):
                continue
            short = self.need(item, kept, machine).short_of(machine, kept)
            if "device" in short:
                most_k[device] = k
            if "host" in short and not machine.device.is_cpu:
                least_k[host] = k
            if not short:
                yield item

    def need(
        self,
        item: PlannedSetting,
        reserve: float | None = None,
        hardware: HardwareProfile | None = None,
    ) -> MemoryNeed:
        """Return the memory that a setting needs; arguments are as in `best`.

        Its strategy says how many gradients wait on the host where the engine, which knows of no
        reserve, would let more of them wait.
        """
        machine = hardware or self.planner.hardware
        kept = self.planner.reserve if reserve is None else reserve
        config = item.strategy.config
        assert config is not None
        own = self._memory(item.strategy, machine)
        depth = own.on(machine, kept).depth
        is_usual = own.on(machine).depth == depth
        key = (item, depth, is_usual)
        if key not in self._needs:
            strategy = item.strategy
            if not is_usual:
                strategy = replace(strategy, config=replace(config, queue_depth=depth))
            self._needs[key] = memory_of(item.workload, strategy, machine)
        return self._needs[key]

    def estimate(self, option: Option, hardware: HardwareProfile | None = None) -> float:
        """Return an estimate of an option's step, seconds, on another machine if one is given."""
        costs = costs_of(option.need.workload, hardware or self.planner.hardware)
        return self._seconds(costs, option.strategy)

    def _seconds(self, costs: StepCosts, strategy: Strategy) -> float:
        return estimated_seconds(costs, strategy, self._memory(strategy, costs.hardware))

    def _memory(self, strategy: Strategy, machine: HardwareProfile) -> EngineMemory:
        """Return one device's part of the engine's memory."""
        assert strategy.config is not None
        whole = engine_memory(self._shapes, strategy.config, self.workload.dtype_bytes)
        return whole.divided(strategy.division(machine))

    def nearest(self, name: str) -> PlannedSetting:
        """Return the setting of a preset that comes nearest to fitting."""
        machine = self.planner.hardware

        def missing(item: PlannedSetting) -> float:
            short = self.need(item).short_of(machine, self.planner.reserve)
            return max((need / max(1.0, room) for need, room in short.values()), default=0.0)

        own = [item for item in self._ordered if item.strategy.name == name]
        return min(own, key=lambda item: (missing(item), len(item.changes)))


def fewer_tokens(workload: Workload) -> Iterator[Workload]:
    """Yield steps of fewer and fewer tokens: fewer sequences, then shorter ones."""
    count = workload.batch_size * workload.accumulation
    sizes = range(count - 1, 0, -1) if count <= 4 else _shares(count)
    for size in sizes:
        yield replace(workload, batch_size=size, accumulation=1)
    length = workload.sequence // 2
    while length >= 128:
        yield replace(workload, batch_size=1, accumulation=1, sequence=length)
        length //= 2


def _shares(count: int) -> list[int]:
    """Return 3/4 and 1/2 of a number, then of its half, and so on down to 1.

    >>> _shares(8)
    [6, 4, 3, 2, 1]
    """
    found: list[int] = []
    while count > 1:
        found += [3 * count // 4, count // 2]
        count //= 2
    return list(dict.fromkeys(size for size in found if size))


def _splits(workload: Workload, recomputes: Collection[bool]) -> Iterator[Workload]:
    """Yield the step's sequences in micro-batches of every size, the one asked for first."""
    count = workload.batch_size * workload.accumulation
    sizes = [size for size in range(count, 0, -1) if count % size == 0]
    sizes.sort(key=lambda size: size != workload.batch_size)
    for checkpointing in recomputes:
        for size in sizes:
            yield replace(
                workload, batch_size=size, accumulation=count // size, checkpointing=checkpointing
            )


def _strategies(
    names: Collection[str], *, releases: bool
) -> Iterator[tuple[Strategy, tuple[str, ...]]]:
    """Yield each preset, zenflow with every setting of the grid, and the changes in words.

    Args:
        names: Presets.
        releases: Whether gradients may leave during backward. Those of float16 may not: its loss
            scaler looks at all of them before the step.
    """
    default = ZenFlowConfig.preset("zenflow")
    for name in names:
        if name != "zenflow":
            yield Strategy.of(name, releases=releases), ()
            continue
        for k in KS:
            for interval in INTERVALS:
                knobs: dict[str, Any] = {"topk_ratio": k, "update_interval": interval}
                changed = {k: v for k, v in knobs.items() if v != getattr(default, k)}
                text = tuple(f"{key}={value}" for key, value in changed.items())
                yield Strategy.of(name, releases=releases, **changed), text


def _changes_of(work: Workload, asked: Workload) -> tuple[str, ...]:
    changes = []
    if work.checkpointing != asked.checkpointing:
        changes.append("checkpointing" if work.checkpointing else "no checkpointing")
    if work.batch_size != asked.batch_size:
        count, size = work.accumulation, work.batch_size
        changes.append(f"{count} micro-batch{'es' if count > 1 else ''} of {size}")
    return tuple(changes)
