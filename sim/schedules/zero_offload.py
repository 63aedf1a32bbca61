"""ZeRO-Offload as published and as DeepSpeed runs it (Ren et al. 2021): all phases in turn.

Gradients leave inside backward, then the CPU updates the whole model, then all weights go up. The
engine's own preset `zero_offload` starts its update as the copies arrive, and is simulated with
the engine's schedule.
"""

from __future__ import annotations

from dataclasses import dataclass

import simpy

from sim.machine import Machine, Process
from sim.schedules.schedule import AbstractSchedule
from sim.timing.costs import StepCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadTraffic:
    """Bytes per parameter of each phase."""

    down: float = 2.0
    """Over the link to the host."""
    prepare: float = 0.0
    """Of DRAM before the update: casts, unscaling, clipping."""
    update: float = 28.0
    """Of DRAM in AdamW: gradient 4 or 2, master and moments read and written 24, weight 2."""
    convert: float = 0.0
    """Of DRAM between update and upload."""
    up: float = 2.0


PUBLISHED = OffloadTraffic()
RELEASED = OffloadTraffic(down=4.0, prepare=8.0, update=28.0, convert=6.0, up=2.0)
"""DeepSpeed 0.19 with one micro-batch a step: gradients leave as float32, their norm is taken on
the device; unscaling and clipping read and write them (8); AdamW moves 28; the master is then cast
into a 16-bit buffer (4 + 2)."""


class ZeroOffload(AbstractSchedule):
    """Forward, backward with copies inside, CPU AdamW, upload, each waiting for the one before.

    With several devices each takes an equal part of gradients and state (ZeRO-2), and an
    all-gather ends the step.
    """

    def __init__(
        self, machine: Machine, costs: StepCosts, traffic: OffloadTraffic = PUBLISHED
    ) -> None:
        """Take the traffic of the published design, or of the released code."""
        super().__init__(machine, costs)
        self._traffic = traffic

    def run(self, num_steps: int) -> Process:
        """Take steps 1 to ``num_steps``."""
        for step in range(1, num_steps + 1):
            copied = self._send(step)
            passed = self.machine.compute("step", self.machine.hardware.overheads.step.value, step)
            yield passed
            since = self.machine.env.now
            yield from self.wait(copied, "d2h", step)
            yield from self._update(step)
            self.end_step(since)

    def _send(self, step: int) -> list[simpy.Event]:
        """Queue forward and backward with the copies of each device's share of gradients."""
        passed = self.compute(step)
        copied = []
        for segment, event in zip(reversed(self.costs.segments), reversed(passed), strict=True):
            work = self.machine.down(segment.numel / self.devices * self._traffic.down)
            copied.append(self.machine.d2h.submit("grads", step, work, [event]))
        return copied

    def _update(self, step: int) -> Process:
        machine, traffic = self.machine, self._traffic
        share = self.costs.num_params / self.devices
        updated = []
        if traffic.prepare:
            work = machine.host_work(share * traffic.prepare)
            updated.append(machine.host.submit("accumulate", step, work))
        work = machine.host_work(share * (traffic.update + traffic.convert))
        updated.append(machine.host.submit("adam", step, work, updated))
        yield from self.wait(updated, "host", step)
        uploaded = machine.h2d.submit("params", step, machine.up(share * traffic.up))
        gathered = machine.collective(
            "all-gather", self.costs.num_params * self.costs.dtype_bytes, step, uploaded
        )
        yield from self.wait([gathered], "h2d", step)
