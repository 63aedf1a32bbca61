"""Choice: the one setting to use for a workload on a machine, and the riskier one behind it.

`zenflow plan`, `zenflow sweep --find` and `zenflow tune` all ask here, so that they agree.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sim.hardware.profile import HardwareProfile
from sim.memory.engine import can_divide
from sim.models.recomputation import Recomputation
from sim.models.workload import Workload
from sim.planning.grid import fewer_tokens
from sim.planning.options import Option, Planner, default_reserve
from sim.planning.rules import FEW_BYTES
from sim.planning.search import Search, groups_of
from sim.timing.division import Division
from zenflow.config import PRESETS, ZenFlowConfig

_FASTER = 1.03
"""Speed-up from which a riskier option is worth naming."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The recommended setting, its alternatives, and the search that found them."""

    recommended: Option | None = None
    """Option that is likely to fit, and leaves the reserve; None if there is none."""
    likeliest: Option | None = None
    """Option that is the likeliest to fit, where none is likely enough to be recommended."""
    search: Search | None = None
    """Search that found it; None if nothing may fit."""
    per_devices: tuple[Option, ...] = ()
    """Best option for each number of devices that was compared, most devices first."""

    @property
    def shown(self) -> Option | None:
        """The recommended option, else the likeliest one; None if nothing may fit."""
        return self.recommended or self.likeliest


class Chooser:
    """Searches for one workload, on any number of the machine's devices and with fewer tokens.

    Each search is made once. See `sim.planning.plan.plan`.
    """

    def __init__(
        self,
        workload: Workload,
        hardware: HardwareProfile,
        *,
        names: Collection[str] = PRESETS,
        checkpointing: Recomputation | None = None,
        reserve: float | None = None,
        parallel: str = "ddp",
        reshards: bool = True,
        releases: bool = True,
        knobs: Mapping[str, Any] | None = None,
        like: Chooser | None = None,
    ) -> None:
        """Start with nothing searched.

        Args:
            workload: Model, and tokens of a step on each device; how these are cut into
                micro-batches is searched.
            hardware: The machine. Fewer of its devices are looked at too.
            names: Presets to choose from.
            checkpointing: What backward recomputes; None tries all and nothing.
            reserve: Bytes to leave free on each device and on the host; None is
                `default_reserve`.
            parallel: How devices share the model, one of `sim.timing.division.PARALLELS`.
            reshards: Whether sharded weights are dropped behind forward.
            releases: Whether gradients may leave during backward.
            knobs: Settings of the update rule that are held.
            like: Chooser of another step of the same model on the same machine, all else equal:
                what one has searched the other need not.
        """
        self.workload = workload
        self.hardware = hardware
        self.reserve = default_reserve(hardware) if reserve is None else reserve
        self._names = list(names)
        self._chunks = False
        self._settings: dict[str, Any] = {
            "names": self._names, "checkpointing": checkpointing, "parallel": parallel,
            "reshards": reshards, "releases": releases, "knobs": knobs,
        }  # fmt: skip
        self._searches: dict[tuple[int, ...], Search] = {} if like is None else like._searches
        # Numbers of devices to look at: all, one host's, half of them, half of these, down to one.
        machines = [hardware]
        if hardware.num_hosts > 1:
            machines.append(replace(hardware, num_hosts=1, network=None))
        while (count := machines[-1].num_devices) > 1:
            machines.append(replace(machines[-1], num_devices=count // 2))
        self.planners: dict[int, Planner] = (
            {machine.total_devices: Planner(machine, reserve=self.reserve) for machine in machines}
            if like is None
            else like.planners
        )
        if {("host_state", "compact"), *FEW_BYTES.items()} & set((knobs or {}).items()):
            self.planners = {n: own for n, own in self.planners.items() if self._can_divide(n)}
        # Steps to look at, those with most tokens first; none where weights exceed the device.
        is_hopeless = is_too_large(workload, hardware, parallel)
        self.works = [] if is_hopeless else [workload, *fewer_tokens(workload)]

    def _can_divide(self, count: int) -> bool:
        """Whether so many devices may share states, gradients and uploads of few bytes."""
        shapes = [parameter.shape for parameter in self.workload.parameters]
        config = ZenFlowConfig(host_state="compact", uploads=self.knobs.get("uploads", "all"))
        division = Division.of(self._settings["parallel"], count)
        return can_divide(shapes, config, self.workload.dtype_bytes, division)

    @property
    def knobs(self) -> Mapping[str, Any]:
        """Settings of the update rule that are held."""
        return self._settings["knobs"] or {}

    def compact(self) -> Chooser:
        """Return the chooser of the same step with compact state on the host."""
        knobs = {**self.knobs, "host_state": "compact"}
        settings = {**self._settings, "knobs": knobs}
        return Chooser(self.workload, self.hardware, reserve=self.reserve, **settings)

    def chunked(self, *, baselines: bool) -> Chooser:
        """Return the chooser of the same step with logits that are never whole.

        Args:
            baselines: Whether presets to compare with may be recommended.
        """
        other = copy.copy(self)  # with the same searches, whose estimates hold for both losses
        other._chunks = True
        if not baselines:
            other._names = groups_of(self._names)[0]
        return other

    def search(self, count: int, workload: Workload) -> Search:
        """Return the search for a step's tokens on so many devices."""
        key = (count, workload.batch_size, workload.accumulation, workload.sequence)
        if key not in self._searches:
            self._searches[key] = Search(workload, self.planners[count], **self._settings)
        found = self._searches[key]
        return found.chunked if self._chunks else found

    @property
    def most_tokens_per_second(self) -> float:
        """Tokens per second that no option exceeds, selections aside.

        Fewer sequences of one length have the same work for each step, and so fewer tokens per
        second; shorter ones save attention.
        """
        shorter = [work for work in self.works if work.sequence < self.workload.sequence]
        bounds = (
            self.search(count, work).most_tokens_per_second
            for work in (*self.works[:1], *shorter)
            for count in self.planners
        )
        return max(bounds, default=0.0)

    def choose(self) -> Choice:
        """Return the setting to use.

        Fewer sequences to a step are tried only where nothing fits with those asked for, and
        shorter sequences only where nothing may fit otherwise. Presets to compare with are for
        those who ask for no other.
        """
        asked = self.workload.sequence
        whole = [work for work in self.works if work.sequence == asked]
        ours, baselines = groups_of(self._names)
        for works in (whole, self.works[len(whole) :]):
            for work in works:
                if (choice := self._recommended(work, ours or baselines)) is not None:
                    return choice
            if (choice := self._likeliest(works)) is not None:
                return choice
        return Choice()

    def _recommended(self, workload: Workload, names: Collection[str]) -> Choice | None:
        """Return the fastest option that is likely to fit; None if there is none.

        Three numbers of devices are compared: the most that fit, one host's, and one.
        """
        found: list[tuple[Option, Search]] = []
        for count in self.planners:
            if found and count not in (1, self.hardware.num_devices):
                continue
            search = self.search(count, workload)
            best = search.best(names=names)
            found += [] if best is None else [(best, search)]
        if not found:
            return None
        chosen, search = max(found, key=lambda pair: pair[0].tokens_per_second)
        options = tuple(option for option, _ in found)
        return Choice(recommended=chosen, search=search, per_devices=options)

    def _likeliest(self, works: Sequence[Workload]) -> Choice | None:
        """Return the likeliest of all options that may fit; None if none may."""
        for reserve in (None, 0.0):
            found = [
                (option, search)
                for search in self._on_all_or_one(works)
                if (option := search.likeliest(self._names, reserve)) is not None
            ]
            if found:  # of equals the first, which has the most tokens
                option, search = max(found, key=lambda pair: round(pair[0].chance or 0.0, 2))
                return Choice(likeliest=option, search=search)
        return None

    def as_likely_as(self, chance: float) -> Choice:
        """Return the likeliest setting of the largest step where that is this likely to fit."""
        for search in self._on_all_or_one(self.works):
            option = search.likeliest(self._names)
            if option is not None and (option.chance or 0.0) >= chance:
                return Choice(likeliest=option, search=search)
        return Choice()

    def _on_all_or_one(self, works: Sequence[Workload]) -> Iterator[Search]:
        """Yield the searches on all devices and on one."""
        for work in works:
            for count in dict.fromkeys((max(self.planners), 1)):
                yield self.search(count, work)

    def riskier(self, choice: Choice) -> Option | None:
        """Return an option that is less likely to fit, and faster or with more tokens to a step.

        None if there is none, or nothing to compare it with.
        """
        shown = choice.shown
        if shown is None:
            return None
        tokens = shown.need.workload.tokens_per_step
        works = [work for work in self.works if work.tokens_per_step >= tokens]
        for search in self._on_all_or_one(works):
            has_more = search.workload.tokens_per_step > tokens
            for reserve in (None, 0.0):
                best = search.best(names=self._names, reserve=reserve, chance=0.0)
                if best is not None:
                    faster = best.tokens_per_second > _FASTER * shown.tokens_per_second
                    if (has_more or faster) and not best.fits:
                        return best
                    break
        return None


def is_too_large(workload: Workload, hardware: HardwareProfile, parallel: str) -> bool:
    """Whether a device's weights alone exceed it."""
    parts = Division.of(parallel, hardware.total_devices).device
    return workload.model_bytes / parts > hardware.device.memory.value
