"""The engine's schedule under FSDP2: each rank has its rows of every matrix, and their update.

Gradients leave as their layer's reduce-scatter ends. Ranks tell each other the norms of columns,
by a small all-reduce for each segment of a layer, or in keep mode for all of them.
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


class ShardedEngineSchedule(EngineSchedule):
    """The engine's rule on sharded weights."""

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
        for unit in reversed(range(len(self._passes.units))):
            indices = self._passes.units[unit][::-1]
            seconds = [self._backward_seconds(index) for index in indices]
            passed, reduced = self._passes.backward(unit, seconds, step, room)
            room = [event for i in indices for event in self._send(i, step, reduced, reduced)]
            measured = [self._add_norms([index], step, reduced) for index in indices][-1]
        self._waits.watch(passed, [("reduce", [measured]), ("d2h", room)], step)
        return [measured, *room]

    def _keep(self, step: int) -> list[simpy.Event]:
        """Queue forward and backward in keep mode; return the end of all reductions."""
        for _ in range(self.costs.accumulation - 1):
            self.forward(step)
            self.backward(step)
        self.forward(step)
        self.computed, reduced = self._passes.backward_all(step)
        return [self._add_norms(list(range(len(self.plan.shares))), step, reduced)]

    def _add_norms(self, indices: list[int], step: int, reduced: simpy.Event) -> simpy.Event:
        """Queue the all-reduce of some segments' column norms; return its end."""
        size = _NORM_BYTES * sum(self.plan.shares[index].columns for index in indices)
        return self.machine.collective("norms", 2.0 * size, step, reduced, blocks=True)
