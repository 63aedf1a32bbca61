"""Updates layer by layer inside backward, as StrongHold does (Sun et al. 2022).

A layer's CPU update starts when its gradient has reached the host, its weights go up at once, and
the next forward waits for them where it comes to that layer. So there is no clipping by a global
norm, and no forward sees an old weight.
"""

from __future__ import annotations

import simpy

from sim.machine import Machine, Process
from sim.memory_parts import zero_offload_parts
from sim.schedules.schedule import AbstractSchedule, Step, System
from sim.timing.costs import StepCosts


class LayerOverlapped(AbstractSchedule):
    """Each layer's update behind the backward of those before it and the next forward.

    The host takes layers as their gradients come, the last one first, which is the one that the
    next forward needs last. With several devices each updates an equal part of every layer,
    between a reduce-scatter and an all-gather. A step ends with its backward.
    """

    def __init__(self, machine: Machine, costs: StepCosts) -> None:
        """Start with all weights on the device."""
        super().__init__(machine, costs)
        self._updated: list[list[simpy.Event]] = [[] for _ in costs.segments]
        self._landed: list[list[simpy.Event]] = [[] for _ in costs.segments]

    def _step(self, step: int) -> Step:
        machine, costs = self.machine, self.costs
        waited = 0.0
        for index in range(len(costs.segments)):
            since = machine.env.now
            yield from self.wait(self._updated[index], "host", step)
            yield from self.wait(self._landed[index], "h2d", step)
            waited += machine.env.now - since
            yield self.forward_of(index, step)
        self._backward(step, is_last=costs.accumulation == 1)
        for micro in range(1, costs.accumulation):
            self.forward(step)
            self._backward(step, is_last=micro == costs.accumulation - 1)
        yield machine.compute("step", self.step_overhead, step)
        return machine.env.now - waited

    def _backward(self, step: int, *, is_last: bool) -> None:
        """Queue one micro-batch's backward, and in the last one what each layer's end sets off."""
        machine = self.machine
        for index in reversed(range(len(self.costs.segments))):
            passed = self.backward_of(index, step)
            if is_last:
                updated = machine.env.process(self._update(index, step, passed))
                self._updated[index] = [updated]
                self._landed[index] = [machine.env.process(self._upload(index, step, updated))]

    def _update(self, index: int, step: int, passed: simpy.Event) -> Process:
        """Take a layer's gradient to the host and through its update."""
        machine, size = self.machine, self.costs.dtype_bytes
        numel = self.costs.segments[index].numel
        share = numel / self.devices
        yield passed  # so that a collective is queued when it is due, and holds up no other
        yield machine.collective("reduce", numel * size, step, passed)
        yield machine.d2h.submit("grads", step, machine.down(share * size))
        yield machine.host.submit("adam", step, machine.host_work(share * (24 + 2 * size)))

    def _upload(self, index: int, step: int, updated: simpy.Event) -> Process:
        """Bring a layer's weights back to all devices."""
        machine, size = self.machine, self.costs.dtype_bytes
        numel = self.costs.segments[index].numel
        yield updated
        uploaded = machine.h2d.submit("params", step, machine.up(numel / self.devices * size))
        yield uploaded
        yield machine.collective("all-gather", numel * size, step, uploaded)


LAYER_OVERLAPPED = System(
    name="layer_overlapped",
    rule="AdamW exactly, without clipping by a global norm",
    schedule=LayerOverlapped,
    memory=zero_offload_parts,  # StrongHold's weights stay on the device here, as in the schedule
)
