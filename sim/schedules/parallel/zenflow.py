"""The engine's schedule under FSDP2: each rank has its rows of every matrix, and their update.

Ranks tell each other the norms of columns, by a small all-reduce for each segment of a layer, or
for all of them in keep mode. A segment's gradients leave when the next one's reduce-scatter has
ended: its norms have been added up meanwhile.
"""

from __future__ import annotations

from typing import Any

import simpy

from sim.machine import Machine
from sim.schedules.parallel.sharded import ShardedPasses
from sim.schedules.zenflow import EngineSchedule
from sim.timing.costs import StepCosts
from sim.timing.framework import fsdp2_hooks
from zenflow.config import ZenFlowConfig

_NORM_BYTES = 4

_Adding = tuple[int, simpy.Event]
"""Index of a segment, and the end of the all-reduce of its norms."""


class ShardedEngineSchedule(EngineSchedule):
    """The engine's rule on weights that are sharded as by FSDP2."""

    def __init__(
        self,
        machine: Machine,
        costs: StepCosts,
        config: ZenFlowConfig,
        *,
        reshards: bool = True,
        **settings: Any,
    ) -> None:
        """Lay out the blocks.

        Args:
            machine: What it runs on.
            costs: Of one step of the model.
            config: The update rule's settings.
            reshards: Whether layers are dropped behind forward.
            settings: As of `EngineSchedule`.
        """
        costs = fsdp2_hooks(costs, reshards=reshards, reduce_bytes=costs.dtype_bytes)
        super().__init__(machine, costs, config, **settings)
        self._passes = ShardedPasses(machine, costs, self._waits, reshards=reshards)

    def forward(self, step: int) -> simpy.Event:
        """Queue the forward of one micro-batch; return the event of its end."""
        self._passes.begin()
        return self._passes.forward(step)

    def backward(self, step: int) -> simpy.Event:
        """Queue the backward of a micro-batch that is not the step's last; return its end."""
        return self._passes.backward_all(step)[0]

    def _compute(self, step: int) -> list[simpy.Event]:
        """Queue forward and backward in release mode; return what the step waits for."""
        for _ in range(self.costs.accumulation - 1):
            self.forward(step)
            self.backward(step)
        self.forward(step)
        room: list[simpy.Event] = []
        adding: _Adding | None = None
        for unit in reversed(range(len(self._passes.units))):
            indices = self._passes.units[unit][::-1]
            seconds = [self._backward[index] for index in indices]
            passed, reduced = self._passes.backward(unit, seconds, step, room)
            room = []
            for index in indices:
                room += self._send_added(adding, step, reduced)
                # A CPU waits for the norms before, and lets the layer's last ones come meanwhile.
                measured = self._add_norms([index], step, reduced, blocks=index != indices[-1])
                adding = index, measured
        room += self._send_added(adding, step, passed)
        self._waits.watch(passed, [("reduce", [measured]), ("d2h", room)], step)
        return [measured, *room]

    def _send_added(
        self, adding: _Adding | None, step: int, since: simpy.Event
    ) -> list[simpy.Event]:
        """Send the segment whose norms are added up, if any; return what gives it room."""
        if adding is None:
            return []
        index, measured = adding
        ready: simpy.Event = self.machine.env.all_of([since, measured])
        return self._send(index, step, ready, ready)

    def _keep(self, step: int) -> list[simpy.Event]:
        """Queue forward and backward in keep mode; return the end of all reductions."""
        for _ in range(self.costs.accumulation - 1):
            self.forward(step)
            self.backward(step)
        self.forward(step)
        self.computed, reduced = self._passes.backward_all(step)
        return [self._add_norms(list(range(len(self.plan.shares))), step, reduced)]

    def _add_norms(
        self, indices: list[int], step: int, reduced: simpy.Event, *, blocks: bool = True
    ) -> simpy.Event:
        """Queue the all-reduce of some segments' column norms; return its end."""
        size = _NORM_BYTES * sum(self.plan.shares[index].columns for index in indices)
        return self.machine.collective("norms", 2.0 * size, step, reduced, blocks=blocks)
