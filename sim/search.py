"""Search: the engine's fastest settings for one step's tokens on a machine. No torch.

Micro-batches, checkpointing, k, S and moments are searched together. Estimates put the settings in
order; the first ones that fit are simulated, until none that is left promises more than the best
of these.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sim.costs import StepCosts, costs_of
from sim.engine_memory import engine_memory
from sim.estimates import estimated_seconds
from sim.hardware import HardwareProfile
from sim.memory import MemoryNeed, memory_of
from sim.options import Option, Planner
from sim.rules import BASELINES, WORTH, distance
from sim.simulate import Strategy
from sim.workload import Workload
from zenflow.config import PRESETS

TOLERANCE = 0.03
"""Share by which what is found may be slower than the best setting of the grid."""
_AS_GOOD = 0.01
"""Share of a step that is no reason to prefer a setting."""
_MOST = 8
"""Settings that are simulated to find the best one."""
KS = (0.1, 0.0, 0.01, 0.02, 0.05, 0.2, 0.3, 0.45, 0.6, 0.8)
"""Shares of columns on the device; the default first, which stays where nothing is faster."""
INTERVALS = (4, 8, 16)
MOMENTS = ("step", "window")
_DEFAULTS: Mapping[str, Any] = {
    "topk_ratio": 0.1, "update_interval": 4, "deferred_moments": "step",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """One setting of the grid."""

    workload: Workload
    strategy: Strategy
    changes: tuple[str, ...]
    """What differs from the preset and from the workload that was asked for."""
    seconds: float
    """What a step takes at least, and about."""
    distance: int
    """Of its rule from AdamW."""

    @property
    def score(self) -> float:
        """Seconds, the more the farther its rule is from AdamW."""
        return self.seconds * WORTH**self.distance


class Search:
    """The engine's settings for the tokens of one step, on one machine.

    Attributes:
        planner: Of the machine.
        workload: What was asked for.
    """

    def __init__(
        self,
        workload: Workload,
        planner: Planner,
        *,
        names: Collection[str] = PRESETS,
        checkpointing: bool | None = None,
    ) -> None:
        """Put all settings in order.

        Args:
            workload: Model, and tokens of a step on each device.
            planner: Of the machine.
            names: Presets to look at.
            checkpointing: Whether backward recomputes; None tries both.
        """
        self.planner = planner
        self.workload = workload
        self._shapes = [parameter.shape for parameter in workload.parameters]
        self._needs: dict[Candidate, MemoryNeed] = {}
        recomputes = (False, True) if checkpointing is None else (checkpointing,)
        strategies = list(_strategies(names, releases=workload.dtype != "float16"))
        made = [
            self._candidate(work, planner.costs(work), strategy, changes)
            for work in _splits(workload, recomputes)
            for strategy, changes in strategies
        ]
        self._ordered = sorted(made, key=lambda item: item.score)

    def _candidate(
        self, work: Workload, costs: StepCosts, strategy: Strategy, changes: tuple[str, ...]
    ) -> Candidate:
        config = strategy.config
        assert config is not None
        own = engine_memory(self._shapes, config, work.dtype_bytes)
        return Candidate(
            workload=work,
            strategy=strategy,
            changes=(*changes, *_changes_of(work, self.workload)),
            seconds=estimated_seconds(costs, config, own, releases=strategy.releases),
            distance=distance(strategy),
        )

    def best(
        self,
        *,
        names: Collection[str] = PRESETS,
        moments: str = "step",
        reserve: float | None = None,
        hardware: HardwareProfile | None = None,
    ) -> Option | None:
        """Return the best setting that fits; None if none does.

        A rule that is farther from AdamW by 1 has to be `WORTH` times as fast. Of settings as
        good the one with the fewest changes is taken. Baselines are taken only
        where they are all that is asked for, or all that fits.

        Args:
            names: Presets to choose from.
            moments: What the moments of the preset zenflow may see.
            reserve: Bytes to leave free; None is the planner's.
            hardware: The machine with other memory; None is as it is.
        """
        first = [name for name in names if name not in BASELINES]
        for group in (first, [name for name in names if name in BASELINES]):
            found = self._best(self.fitting(group, moments, reserve, hardware))
            if found is not None:
                return self.option(found, hardware)
        return None

    def _best(self, fitting: Iterator[Candidate]) -> Candidate | None:
        simulated: list[tuple[float, Candidate]] = []
        for item in fitting:
            if simulated:
                best = min(simulated, key=_score)[0]
                if len(simulated) == _MOST or item.score >= best * (1 - _AS_GOOD):
                    break
            taken = self.planner.predict(item.workload, item.strategy).step_seconds
            simulated.append((taken * WORTH**item.distance, item))
        if not simulated:
            return None
        most = min(simulated, key=_score)[0] * (1 + _AS_GOOD)
        good = [item for score, item in simulated if score <= most]
        return min(
            good,
            key=lambda item: (len(item.changes), item.distance, self.need(item).device_bytes),
        )

    def option(self, item: Candidate, hardware: HardwareProfile | None = None) -> Option:
        """Return a setting as an option, on the machine with other memory if one is given."""
        found = self.planner.option_of(self.need(item), hardware)
        return replace(found, changes=item.changes)

    def fitting(
        self,
        names: Collection[str] = PRESETS,
        moments: str = "step",
        reserve: float | None = None,
        hardware: HardwareProfile | None = None,
    ) -> Iterator[Candidate]:
        """Yield settings that fit, those that promise most first; arguments are those of `best`.

        More columns on the device never need less of its memory, nor more of the host's; what
        moments see is the host's matter, micro-batches and checkpointing the device's.
        """
        machine = hardware or self.planner.hardware
        kept = self.planner.reserve if reserve is None else reserve
        most_k: dict[tuple[str, int, int, bool], float] = {}
        least_k: dict[tuple[str, int, str], float] = {}
        for item in self._ordered:
            config = item.strategy.config
            assert config is not None
            name, k = item.strategy.name, config.topk_ratio
            if name not in names or (name == "zenflow" and config.deferred_moments != moments):
                continue
            interval, work = config.update_interval, item.workload
            device = (name, interval, work.batch_size, work.checkpointing)
            host = (name, interval, config.deferred_moments)
            if k >= most_k.get(device, 2.0) or k <= least_k.get(host, -1.0):
                continue
            short = self.need(item).short_of(machine, kept)
            if "device" in short:
                most_k[device] = k
            if "host" in short and not machine.device.is_cpu:
                least_k[host] = k
            if not short:
                yield item

    def need(self, item: Candidate) -> MemoryNeed:
        """Return the memory that a setting takes."""
        if item not in self._needs:
            self._needs[item] = memory_of(item.workload, item.strategy, self.planner.hardware)
        return self._needs[item]

    def estimate(self, option: Option, hardware: HardwareProfile | None = None) -> float:
        """Return about what an option's step takes, on another machine if one is given."""
        config = option.strategy.config
        assert config is not None
        work, machine = option.need.workload, hardware or self.planner.hardware
        own = engine_memory(self._shapes, config, work.dtype_bytes)
        costs = costs_of(work, machine)
        return estimated_seconds(costs, config, own, releases=option.strategy.releases)

    def nearest(self, name: str) -> Candidate:
        """Return the setting of a preset that comes nearest to fitting."""
        machine = self.planner.hardware

        def missing(item: Candidate) -> float:
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
    """Return 3/4 and 1/2 of a number, and of each half again, down to 1."""
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
    """Yield each preset, and zenflow's with every setting of the grid, with what is changed.

    A loss scaler looks at all gradients before the step, so that float16's can't leave before.
    """
    for name in names:
        if name != "zenflow":
            yield Strategy.of(name, releases=releases), ()
            continue
        for k in KS:
            for interval in INTERVALS:
                for moments in MOMENTS:
                    knobs: dict[str, Any] = {"topk_ratio": k, "update_interval": interval}
                    knobs["deferred_moments"] = moments
                    changed = {key: v for key, v in knobs.items() if v != _DEFAULTS[key]}
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


def _score(item: tuple[float, Candidate]) -> float:
    return item[0]
