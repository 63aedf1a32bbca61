"""No offload: gradients and optimizer state stay on the device."""

from __future__ import annotations

from sim.machine import Process
from sim.schedules.schedule import AbstractSchedule


class OnDevice(AbstractSchedule):
    """Forward, backward, AdamW over everything the device owns.

    With several devices the state is sharded (ZeRO-1): each updates its part, and an all-gather
    brings the others' weights.
    """

    def run(self, num_steps: int) -> Process:
        """Take steps 1 to ``num_steps``."""
        machine, costs = self.machine, self.costs
        seconds = self.update_seconds(costs.num_params / self.devices)
        for step in range(1, num_steps + 1):
            reduced = self.compute(step)
            yield self.computed
            since = machine.env.now
            yield from self.wait(reduced, "reduce", step)
            began = machine.env.now
            updated = machine.compute(
                "step", machine.hardware.overheads.step.value + seconds, step
            )
            yield updated
            since += machine.env.now - began  # it works meanwhile
            size = costs.num_params * costs.dtype_bytes
            gathered = machine.collective("all-gather", size, step, updated)
            yield from self.wait([gathered], "gather", step)
            self.end_step(since)
