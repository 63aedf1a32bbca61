"""ZeRO-Offload as published, and its one-step delayed update.

By Ren et al. 2021. Gradients leave inside backward, then the CPU updates the whole model, then all
weights go up. What DeepSpeed makes of it is in `sim.schedules.systems.deepspeed_zero_offload`. The
engine's own presets `zero_offload`, which starts its update as the copies arrive, and `delayed`
are simulated with the engine's schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import simpy

from sim.machine import Machine, Process
from sim.memory_parts import SystemCase, SystemParts, zero_offload_parts
from sim.schedules.schedule import AbstractSchedule, Step, System
from sim.timing.costs import StepCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadTraffic:
    """Bytes per parameter of each phase."""

    down: float = 2.0
    """Bytes over the link to the host."""
    prepare: float = 0.0
    """Bytes of DRAM before the update: casts, unscaling, clipping."""
    update: float = 28.0
    """Bytes of DRAM in AdamW: gradient 4 or 2, master and moments twice 12, weight 2."""
    convert: float = 0.0
    """Bytes of DRAM between update and upload."""
    up: float = 2.0
    """Bytes over the link to the device."""


PUBLISHED = OffloadTraffic()


class ZeroOffload(AbstractSchedule):
    """Forward, backward with copies inside, CPU AdamW, upload, each waiting for the one before.

    With several devices each takes an equal part of gradients and state (ZeRO-2), and an
    all-gather ends the step.
    """

    def __init__(
        self, machine: Machine, costs: StepCosts, traffic: OffloadTraffic = PUBLISHED
    ) -> None:
        """Take the traffic of the published design, or of released code."""
        super().__init__(machine, costs)
        self._traffic = traffic
        self._around = machine.host_kind
        """Kind of flow of the passes before and after AdamW."""

    def _step(self, step: int) -> Step:
        copied = self.send(self.compute(step), step, self._traffic.down)
        yield self.machine.compute("step", self.step_overhead, step)
        since = self.machine.env.now
        yield from self.wait(copied, "d2h", step)
        yield from self._update(step)
        return since

    def _update(self, step: int) -> Process:
        machine, traffic = self.machine, self._traffic
        share = self.costs.num_params / self.devices
        updated: list[simpy.Event] = []
        for name, size, kind in (
            ("accumulate", traffic.prepare, self._around),
            ("adam", traffic.update, machine.host_kind),
            ("cast", traffic.convert, self._around),
        ):
            if size:
                work = machine.host_work(share * size, kind=kind)
                updated.append(machine.host.submit(name, step, work, updated))
        yield from self.wait(updated, "host", step)
        uploaded = machine.h2d.submit("params", step, machine.up(share * traffic.up))
        yield from self.wait([self.gather(step, uploaded)], "h2d", step)


class Delayed(AbstractSchedule):
    """Updates of the whole model, each behind the next step (Ren et al. 2021, section 5.2).

    The device waits only where the CPU takes longer than a step of the device does.
    """

    _updated: Sequence[simpy.Event] = ()
    """Ends of the uploads of the last step's update."""

    def _step(self, step: int) -> Step:
        machine = self.machine
        copied = self.send(self.compute(step), step, self.costs.dtype_bytes)
        yield machine.compute("step", self.step_overhead, step)
        since = machine.env.now
        yield from self.wait(self._updated, "host", step)
        self._updated = self._update(step, copied)
        return since

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


def _delayed_memory(case: SystemCase) -> SystemParts:
    """Return a second gradient buffer too: new ones come while the last are still read."""
    return case.device(), case.offloaded(gradient_buffers=2)


PUBLISHED_ZERO_OFFLOAD = System(
    name="published_zero_offload",
    rule="AdamW exactly",
    schedule=ZeroOffload,
    memory=zero_offload_parts,
)
PUBLISHED_DELAYED = System(
    name="published_delayed",
    rule="AdamW with every update one step late",
    schedule=Delayed,
    memory=_delayed_memory,
)
