"""Shared: costs and memory of points that differ in axes which don't matter to them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from sim.memory.need import MemoryNeed, memory_of
from sim.timing.costs import StepCosts, costs_of

if TYPE_CHECKING:
    from experiments.sweeps.axes.kinds import AxisKind
    from experiments.sweeps.grid import Case, Sweep

_MOST = 256
"""Largest number of costs, and of needs, that are kept."""
_LINK = ("link", "link_rate")
_HOST = ("host", "host_ram", "nvme", "cores", "host_threads")
"""Axes of the host and its drives, by target."""

Found = TypeVar("Found")


class Shared:
    """Facts and caches that points of one sweep have in common."""

    def __init__(self, sweep: Sweep) -> None:
        """Start with nothing."""
        self._sweep = sweep
        self._known: dict[Hashable, Any] = {}
        kinds = (_matters_to_costs, _matters_to_memory)
        self._axes: dict[Callable[[AxisKind], bool], list[str]] = {
            matters: [axis.name for axis in sweep.axes if matters(axis.kind)] for matters in kinds
        }

    def costs(self, point: int, case: Case) -> StepCosts:
        """Return a point's costs.

        Raises:
            ConfigError: The device's peak for the workload's dtype is not known.
        """

        def find() -> StepCosts:
            return costs_of(case.workload, case.hardware)

        if case.workload.traced is not None:  # which knows of the machine's own parts
            return find()
        return replace(self._found(_matters_to_costs, point, find), hardware=case.hardware)

    def memory(self, point: int, case: Case) -> MemoryNeed:
        """Return a point's need of memory.

        Raises:
            ConfigError: The device's peak for the workload's dtype is not known.
        """

        def find() -> MemoryNeed:
            return memory_of(case.workload, case.strategy, case.hardware)

        # That of some other systems, and of a CPU, follows from how fast links are.
        if case.strategy.config is None or case.hardware.device.is_cpu:
            return find()
        return self._found(_matters_to_memory, point, find)

    def _found(
        self, matters: Callable[[AxisKind], bool], point: int, find: Callable[[], Found]
    ) -> Found:
        values = self._sweep.values(point)
        key = matters, tuple([values[name] for name in self._axes[matters]])
        if key not in self._known:
            if len(self._known) > _MOST:
                self._known.clear()
            self._known[key] = find()
        found: Found = self._known[key]
        return found


def _matters_to_costs(kind: AxisKind) -> bool:
    """Whether an axis changes what the device takes, not only what it runs beside."""
    is_beside = kind.target in (*_LINK, *_HOST) or kind.target.startswith(("link.", "host."))
    return not is_beside and kind.place not in ("knob", "strategy")


def _matters_to_memory(kind: AxisKind) -> bool:
    """Whether an axis may change a need of memory: as the host's may, by what waits there."""
    is_link = kind.target in _LINK or kind.target.startswith("link.")
    return not is_link and kind.target != "select_interval"
