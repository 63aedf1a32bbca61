"""ZeRO-Offload as released: DeepSpeed 0.19, ZeRO stage 2 with the optimizer on the CPU.

Written from deepspeed/runtime/zero/stage_1_and_2.py. Gradients of every micro-batch leave: sums
are kept on the host and added to by way of the device, so the device keeps no whole gradient.
Copies are queued on the stream that computes, as the stream for them is commented out there.

On the host `step()` runs three passes in turn: `unscale_and_clip_grads`, CPU-Adam, and the copy of
the master into a 16-bit buffer. Nobody has timed them apart. By the whole step's time and by what
kernels reach, the first and the last, which are torch operations, are far slower than the kernel.
"""

from __future__ import annotations

import simpy

from sim.hardware.components import Host
from sim.machine import Machine, least_seconds
from sim.memory_parts import FLOAT_BYTES, REDUCE_BUCKET, Part, SystemCase, SystemParts
from sim.schedules.schedule import Step, System
from sim.schedules.systems.zero_offload import OffloadTraffic, ZeroOffload
from sim.timing.costs import StepCosts
from sim.timing.framework import deepspeed_hooks, non_finite_bytes, norm_bytes
from sim.timing.segments import Segment

RELEASED = OffloadTraffic(down=4.0, prepare=8.0, update=28.0, convert=6.0, up=2.0)
"""Traffic of the last micro-batch and the step, bytes for each element.

- Gradients leave as float32 (4), and their norm is taken on the device.
- Unscaling and clipping read and write them (8).
- AdamW moves 28; the master is then cast into a 16-bit buffer (4 + 2)."""
_NOTHING = 1e-6
"""Bytes that stand for no traffic at all."""


def step_rate(host: Host) -> float:
    """Return the bytes/s of DRAM that DeepSpeed's whole CPU step moves on one socket."""
    return host.deepspeed_share.value * host.dram.value


def around_rate(host: Host) -> float:
    """Return the bytes/s of the passes before and after CPU-Adam, whatever a host's ranks.

    They take what the kernel leaves of the whole step's time on one socket. On several sockets the
    kernel is faster, and they are not. Where it leaves nothing they are bounded as it is.
    """
    around = RELEASED.prepare + RELEASED.convert
    whole = (around + RELEASED.update) / host.deepspeed_share.value
    left = whole - RELEASED.update / host.adam_share.value
    return around * host.dram.value / max(_NOTHING, left)


def host_seconds(machine: Machine, num_params: float) -> float:
    """Return the seconds of one device's part of the CPU step, if nothing competes with it."""
    around = machine.bounded_host(around_rate(machine.hardware.host))
    return least_seconds(machine.host_kind, RELEASED.update * num_params) + least_seconds(
        around, (RELEASED.prepare + RELEASED.convert) * num_params
    )


def offload_hooks(costs: StepCosts) -> StepCosts:
    """Return the costs of layers whose gradients DeepSpeed sends to the host.

    Of its own part a device looks for infinities and for what is no number, takes the norm in
    float64, and casts to float32. This is counted for every micro-batch, although all but the last
    have a sum in its place.
    """
    size = costs.dtype_bytes
    own = non_finite_bytes(size) + norm_bytes(size) + size + FLOAT_BYTES
    return deepspeed_hooks(costs, own_bytes=own, own_kernels=9, bucket_elements=REDUCE_BUCKET)


class DeepSpeedZeroOffload(ZeroOffload):
    """Micro-batches whose gradients leave one by one, then the CPU's step and one upload.

    - All but the last micro-batch send 16-bit gradients; from the second on, the sum so far comes
      up first and is added on the device.
    - The last one sends the sum back too, and then itself in float32.
    - With `overlap_comm` copies are on the stream of reductions, for which backward waits when it
      ends; without, DeepSpeed's default below stage 3, backward waits for each of them.
    """

    def __init__(self, machine: Machine, costs: StepCosts, *, overlap_comm: bool = False) -> None:
        """Take DeepSpeed's option of this name."""
        super().__init__(machine, offload_hooks(costs), RELEASED)
        self._around = machine.bounded_host(around_rate(machine.hardware.host))
        self._overlap = overlap_comm
        self._queued: list[simpy.Event] = []

    def _step(self, step: int) -> Step:
        waited = 0.0
        for micro_batch in range(self.costs.accumulation):
            self.forward(step)
            waited += yield from self._backward(step, micro_batch)
        yield self.machine.compute("step", self.step_overhead, step)
        since = self.machine.env.now - waited
        yield from self._update(step)
        return since

    def _backward(self, step: int, micro_batch: int) -> Step:
        """Run a micro-batch's backward; the result is the seconds in which the device waits."""
        waited = 0.0
        for index, segment in reversed(list(enumerate(self.costs.segments))):
            passed = self.backward_of(index, step)
            self._leave(segment, step, passed, micro_batch)
            if not self._overlap or segment is self.costs.segments[0]:
                yield passed
                waited += yield from self.wait(self._queued, "d2h", step)
        return waited

    def _leave(self, segment: Segment, step: int, passed: simpy.Event, micro_batch: int) -> None:
        """Queue what happens to a segment's gradients behind what happens to the last one's."""
        machine, share = self.machine, segment.numel / self.devices
        size, last = share * self.costs.dtype_bytes, self.costs.accumulation - 1
        whole = segment.numel * self.costs.dtype_bytes
        # The bucket is reduced to all devices (`use_multi_rank_bucket_allreduce`).
        events = [machine.collective("reduce", 2 * whole, step, passed), *self._queued]
        if micro_batch > 0:
            events = [machine.h2d.submit("accumulator", step, machine.up(size), events)]
        if last > 0:
            events = [machine.d2h.submit("grads", step, machine.down(size), events)]
        if micro_batch == last:
            work = machine.down(share * self._traffic.down)
            events = [machine.d2h.submit("grads", step, work, events)]
        self._queued = events


def _memory(case: SystemCase) -> SystemParts:
    """Return the release's parts: on the host 18 bytes of an element, sums, and rounding.

    Master and gradient of 4 bytes and 2 of 16-bit weights to upload are pinned (stage_1_and_2.py),
    and moments of 8 are not. DeepSpeed issue 7693 has 28 bytes of November 2025, with what pinned
    memory is rounded up by; its comment of July 2026 measured the passes of 0.19 on torch 2.12,
    and none left anything behind.
    """
    host = [
        *case.pinned("masters", FLOAT_BYTES),
        *case.pinned("gradients", FLOAT_BYTES),
        *case.pinned("weights to upload", 2),
        Part("moments", "pageable", 2 * FLOAT_BYTES * case.hosted),
    ]
    if case.workload.accumulation > 1:
        host += case.pinned("accumulators", case.size)
    buckets = 2 if case.options["overlap_comm"] else 1
    return case.deepspeed_device(buckets=buckets, takes_norms=True), host


DEEPSPEED_ZERO_OFFLOAD = System(
    name="deepspeed_zero_offload",
    rule="AdamW exactly",
    schedule=DeepSpeedZeroOffload,
    memory=_memory,
)
