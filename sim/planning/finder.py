"""Finder: searches for one workload with fewer devices or fewer tokens to a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from sim.hardware.profile import HardwareProfile
from sim.memory.need import memory_of
from sim.models.table import find_model, model_names
from sim.models.workload import Workload
from sim.planning.improvements import Improvement, faster_parts, more_memory
from sim.planning.options import Option, Planner
from sim.planning.search import Search, fewer_tokens
from sim.simulate import Strategy
from zenflow.config import PRESETS


class Finder:
    """Searches for one workload, on any number of the machine's devices and with fewer tokens.

    It remembers each search.
    """

    def __init__(
        self,
        workload: Workload,
        hardware: HardwareProfile,
        strategies: Sequence[str],
        checkpointing: bool | None,
        reserve: float,
    ) -> None:
        """Start with nothing searched; arguments are those of `sim.planning.plan.plan`."""
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
        """Return the search for as many tokens as a workload has, on so many devices."""
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
        """Numbers of devices to look at: all, half of them, half of these, down to one."""
        counts = [self._hardware.num_devices]
        while counts[-1] > 1:
            counts.append(counts[-1] // 2)
        return counts

    def chosen(self) -> tuple[Option | None, tuple[Option, ...]]:
        """Return the fastest option, and the best one for each number of devices.

        Two numbers are compared: the most devices that fit, and one. Fewer tokens to a step are
        tried only where nothing fits with those asked for.
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
        """Return an option that leaves less than the reserve; None if there is no use for one.

        It has more tokens to a step than the chosen one, or any number if none is chosen.
        """
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
        """Yield the best option of each strategy, on as many devices as the recommended one."""
        if search is None:
            search = self.search(self._hardware.num_devices, self._workload)
        for name in self._presets:
            best = search.best(names=(name,)) or search.best(names=(name,), reserve=0.0)
            yield best or search.option(search.nearest(name))
        for name in self._systems:
            yield search.planner.fitted(search.workload, Strategy.of(name))

    def improvements(self, chosen: Option | None, search: Search | None) -> Iterable[Improvement]:
        """Yield changes of the machine that would help, those to make first at the front."""
        if chosen is not None and search is not None:
            yield from faster_parts(chosen, search)
            return
        works = [self._workload, *([] if self._is_hopeless else fewer_tokens(self._workload))]
        yield from more_memory([self.search(1, work) for work in works], self._presets)

    def largest(self) -> str | None:
        """Return the largest named model that one device trains; None if it trains this one."""
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
