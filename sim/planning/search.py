"""Search: the engine's fastest settings for one step's tokens on a machine.

Micro-batches, checkpointing, k and S are searched together; as many gradients wait on the host as
it has room for. Estimates put the settings in order. Those that fit are simulated in this order,
until none that is left promises more than the best of them.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from sim.hardware.profile import HardwareProfile
from sim.memory.engine import EngineMemory, engine_memory
from sim.memory.need import MemoryNeed, memory_of
from sim.models.recomputation import Recomputation
from sim.models.workload import Workload
from sim.planning.estimates import estimated_seconds, with_framework
from sim.planning.grid import PlannedSetting, changes_of, splits, strategies
from sim.planning.options import Option, Planner
from sim.planning.rules import BASELINES, WORTH, distance
from sim.simulate import Strategy
from sim.timing.costs import StepCosts, costs_of
from zenflow.config import PRESETS

_AS_GOOD = 0.01
"""Share of a step by which a setting may be slower and still count as equally good."""
_MOST = 8
"""Largest number of settings that are simulated for one answer."""


class Search:
    """The engine's settings for the tokens of one step, on one machine.

    See `sim.planning.plan.plan`.
    """

    def __init__(
        self,
        workload: Workload,
        planner: Planner,
        *,
        names: Collection[str] = PRESETS,
        checkpointing: Recomputation | None = None,
        parallel: str = "ddp",
        reshards: bool = True,
        releases: bool = True,
        knobs: Mapping[str, Any] | None = None,
    ) -> None:
        """Put all settings in order.

        Args:
            workload: Model, and tokens of a step on each device.
            planner: Simulates settings on the machine, and remembers what it has simulated.
            names: Presets to look at.
            checkpointing: What backward recomputes; None tries all and nothing.
            parallel: How devices share the model, one of `sim.timing.division.PARALLELS`.
            reshards: Whether sharded weights are dropped behind forward.
            releases: Whether gradients may leave during backward; those of float16 never do.
            knobs: Settings of the update rule that are held.
        """
        self.planner = planner
        self.workload = workload
        self._shapes = tuple(parameter.shape for parameter in workload.parameters)
        self._needs: dict[tuple[PlannedSetting, int, bool], MemoryNeed] = {}
        recomputes: tuple[Recomputation, ...] = (False, True)
        if checkpointing is not None:
            recomputes = (checkpointing,)
        releases = releases and workload.dtype != "float16"  # its loss scaler looks at all of them
        tried = [
            (replace(strategy, parallel=parallel, reshards=reshards), changes)
            for strategy, changes in strategies(names, knobs or {}, releases=releases)
        ]
        made = [
            setting
            for work in splits(workload, recomputes)
            for setting in self._settings(work, tried)
        ]
        self._ordered = sorted(made, key=lambda item: item.score)

    def _settings(
        self, work: Workload, tried: Iterable[tuple[Strategy, tuple[str, ...]]]
    ) -> Iterator[PlannedSetting]:
        """Yield settings of the engine for a step that is computed in one way."""
        costs = self.planner.costs(work)
        hooked: dict[bool, StepCosts] = {}  # strategies differ in nothing else that counts here
        for strategy, changes in tried:
            if strategy.releases not in hooked:
                hooked[strategy.releases] = with_framework(costs, strategy)
            yield PlannedSetting(
                workload=work,
                strategy=strategy,
                changes=(*changes, *changes_of(work, self.workload)),
                seconds=self._seconds(costs, strategy, hooked[strategy.releases]),
                distance=distance(strategy),
            )

    @functools.cached_property
    def chunked(self) -> Search:
        """Search of the same settings with a loss in chunks, by the same estimates."""
        works = {id(item.workload): item.workload for item in self._ordered}
        chunked = {key: replace(work, loss="chunks") for key, work in works.items()}
        other = copy.copy(self)
        other._needs = {}
        other._ordered = [
            replace(
                item, workload=chunked[id(item.workload)], changes=(*item.changes, "chunked loss")
            )
            for item in self._ordered
        ]
        return other

    @property
    def most_worth(self) -> float:
        """Tokens per second, by distance from AdamW, that no setting that fits exceeds; or 0."""
        found = next(self.fitting(), None)
        tokens = self.planner.hardware.total_devices * self.workload.tokens_per_step
        return 0.0 if found is None else tokens / found.score

    @property
    def most_tokens_per_second(self) -> float:
        """Tokens per second over all devices that no setting exceeds, selections aside."""
        tokens = self.planner.hardware.total_devices * self.workload.tokens_per_step
        return tokens / min(item.seconds for item in self._ordered)

    def best(
        self,
        *,
        names: Collection[str] = PRESETS,
        reserve: float | None = None,
        chance: float | None = None,
        hardware: HardwareProfile | None = None,
    ) -> Option | None:
        """Return the best setting that fits; None if none does.

        A rule that is farther from AdamW by 1 has to be `WORTH` times as fast. Of equally good
        settings the one with the fewest changes is taken. Baselines are taken only where they are
        all that is asked for, or all that fits.

        Args:
            names: Presets to choose from.
            reserve: Bytes to leave free; None takes the planner's.
            chance: Least chance to fit the device; None takes the planner's.
            hardware: The same machine with other memory; None takes it as it is.
        """
        for group in groups_of(names):
            found = self._best(group, reserve, chance, hardware)
            if found is not None:
                return self.option(found, reserve, hardware)
        return None

    def _best(
        self,
        names: Collection[str],
        reserve: float | None,
        chance: float | None,
        hardware: HardwareProfile | None,
    ) -> PlannedSetting | None:
        scores: dict[PlannedSetting, float] = {}
        for item in self.fitting(names, reserve, chance, hardware):
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
        chance: float | None = None,
        hardware: HardwareProfile | None = None,
    ) -> Iterator[PlannedSetting]:
        """Yield the settings that fit, those that promise most first; arguments are as in `best`.

        A setting is left out unseen where its neighbours tell that it can't fit. More columns on
        the device never need less of its memory, nor more of the host's; micro-batches and
        checkpointing concern the device's alone.
        """
        machine = hardware or self.planner.hardware
        kept = self.planner.reserve if reserve is None else reserve
        likely = self.planner.chance if chance is None else chance
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
            short = self.need(item, kept, machine).short_of(machine, kept, likely)
            if "device" in short:
                most_k[device] = k
            if "host" in short and not machine.device.is_cpu:
                least_k[host] = k
            if not short:
                yield item

    def likeliest(self, names: Collection[str], reserve: float | None = None) -> Option | None:
        """Return the setting that is the likeliest to fit; None if none fits by prediction.

        Of equally likely settings the most promising one is taken; arguments are as in `best`.
        """
        machine = self.planner.hardware

        def chance(item: PlannedSetting) -> float:
            return round(self.need(item, reserve).chance(machine) or 0.0, 2)

        for group in groups_of(names):
            # Those that promise most come first, and `max` takes the first of equals.
            found = max(self.fitting(group, reserve, 0.0), key=chance, default=None)
            if found is not None:
                return self.option(found, reserve)
        return None

    def need(
        self,
        item: PlannedSetting,
        reserve: float | None = None,
        hardware: HardwareProfile | None = None,
    ) -> MemoryNeed:
        """Return the memory that a setting needs; arguments are as in `best`.

        Its strategy says how many gradients wait on the host where the engine, which knows of no
        reserve, would let more of them wait. With compact state the engine knows of no memory
        either.
        """
        machine = hardware or self.planner.hardware
        kept = self.planner.reserve if reserve is None else reserve
        config = item.strategy.config
        assert config is not None
        own = self._memory(item.strategy, machine)
        depth = own.on(machine, kept).depth
        if config.is_compact:
            depth = own.most_depth(machine, kept)
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

    def _seconds(
        self, costs: StepCosts, strategy: Strategy, hooked: StepCosts | None = None
    ) -> float:
        own = self._memory(strategy, costs.hardware)
        return estimated_seconds(costs, strategy, own, hooked)

    def _memory(self, strategy: Strategy, machine: HardwareProfile) -> EngineMemory:
        """Return one device's part of the engine's memory."""
        assert strategy.config is not None
        key = strategy.config, strategy.division(machine)
        memories = self.planner.memories
        if key not in memories:
            whole = engine_memory(self._shapes, strategy.config, self.workload.dtype_bytes)
            memories[key] = whole.divided(key[1])
        return memories[key]

    def nearest(self, name: str) -> PlannedSetting:
        """Return the setting of a preset that comes nearest to fitting."""
        machine = self.planner.hardware

        def missing(item: PlannedSetting) -> float:
            short = self.need(item).short_of(machine, self.planner.reserve)
            return max((need / max(1.0, room) for need, room in short.values()), default=0.0)

        own = [item for item in self._ordered if item.strategy.name == name]
        return min(own, key=lambda item: (missing(item), len(item.changes)))


def groups_of(names: Collection[str]) -> tuple[list[str], list[str]]:
    """Return the presets to recommend, and the baselines, for those who ask for no other."""
    others = [name for name in names if name not in BASELINES]
    return others, [name for name in names if name in BASELINES]
