"""The one-step delayed update (Ren et al. 2021, section 5.2): updates run behind the next step.

The device waits only where the CPU takes longer than a step of the device does.
"""

from __future__ import annotations

import simpy

from sim.machine import Process
from sim.memory.systems import SystemCase, SystemParts
from sim.schedules.schedule import AbstractSchedule
from sim.schedules.system import System


class Delayed(AbstractSchedule):
    """Updates of the whole model, each used one step late."""

    def run(self, num_steps: int) -> Process:
        """Take steps 1 to ``num_steps``."""
        machine = self.machine
        updated: list[simpy.Event] = []
        for step in range(1, num_steps + 1):
            copied = self.send(self.compute(step), step, self.costs.dtype_bytes)
            yield machine.compute("step", self.step_overhead, step)
            since = machine.env.now
            yield from self.wait(updated, "host", step)
            updated = self._update(step, copied)
            self.end_step(since)

    def _update(self, step: int, copied: list[simpy.Event]) -> list[simpy.Event]:
        """Queue this step's update behind its copies, and the upload behind that, in pieces."""
        machine, size = self.machine, self.costs.dtype_bytes
        uploaded = []
        for segment, copy in zip(reversed(self.costs.segments), copied, strict=True):
            share = segment.numel / self.devices
            work = machine.host_work(share * (24 + 2 * size))
            done = machine.host.submit("adam", step, work, [copy], deadline=step + 1)
            uploaded.append(machine.h2d.submit("params", step, machine.up(share * size), [done]))
        return [*uploaded, self.gather(step, uploaded[-1])]


def _memory(case: SystemCase) -> SystemParts:
    """Return a second gradient buffer too: new ones come while the last are still read."""
    return case.device(), case.offloaded(gradient_buffers=2)


PUBLISHED_DELAYED = System(
    name="published_delayed",
    rule="AdamW with every update one step late",
    schedule=Delayed,
    memory=_memory,
)
