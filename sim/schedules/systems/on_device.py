"""No offload: gradients and optimizer state stay on the device."""

from __future__ import annotations

import simpy

from sim.memory_parts import Part, SystemCase, SystemParts
from sim.schedules.schedule import AbstractSchedule, Step, System


class OnDevice(AbstractSchedule):
    """Forward, backward, AdamW over everything the device owns.

    With several devices the state is sharded (ZeRO-1): each updates its part, and an all-gather
    brings the others' weights.
    """

    def _step(self, step: int) -> Step:
        machine = self.machine
        seconds = self.step_overhead + self.update_seconds(self.costs.num_params / self.devices)
        reduced = self.compute(step)
        yield self.computed
        since = machine.env.now
        yield from self.wait(reduced, "reduce", step)
        yield from self.wait(self._fetched(step), "h2d", step)
        began = machine.env.now
        updated = machine.compute("step", seconds, step)
        yield updated
        since += machine.env.now - began  # it works meanwhile
        yield from self.wait([self.gather(step, updated)], "gather", step)
        yield from self.wait(self._sent_home(step), "d2h", step)
        return since

    def _fetched(self, step: int) -> list[simpy.Event]:
        """Queue the copies of what the update needs of the host; nothing here."""
        return []

    def _sent_home(self, step: int) -> list[simpy.Event]:
        """Queue the copies that end a step; none here."""
        return []


def _memory(case: SystemCase) -> SystemParts:
    """Return ZeRO-1's parts (Rajbhandari et al. 2020, section 5): 12 bytes of state are shared."""
    own = Part("optimizer state", "device", case.state_bytes * case.params / case.total)
    return case.device(own, after=case.params * case.size), []


PUBLISHED_ON_DEVICE = System(
    name="published_on_device",
    rule="AdamW exactly",
    schedule=OnDevice,
    memory=_memory,
)
