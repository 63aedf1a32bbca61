"""ZenFlow as released: DeepSpeed 0.19, deepspeed/runtime/zenflow, ZeRO stage 2.

Written from what its code does, which is not the paper's design: whole gradients go to the host,
summed up by way of the device, the host updates important columns as well, and all that ends a
window happens in turn in the training process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import simpy

from sim.fluid import FlowKind
from sim.lanes import HostLane, Work
from sim.machine import Machine, Process
from sim.memory_parts import FLOAT_BYTES, Part, SystemCase, SystemParts
from sim.schedules.schedule import AbstractSchedule, Step, System
from sim.schedules.systems.deepspeed_zero_offload import offload_hooks, step_rate
from sim.timing.costs import StepCosts
from sim.timing.segments import Segment
from zenflow.config import raise_violations


class DeepSpeedZenFlow(AbstractSchedule):
    """Micro-batches in windows of S, each of them one of the release's steps.

    - Copies of gradients are queued on the stream that computes (`overlap_comm` is off below stage
      3, and the side stream is commented out). Backward waits for each of them, and the link never
      works both ways.
    - With overlap the update runs in a process of its own, lane `host`, on its part of the cores;
      the training process has the lane `main` and the others.
    - Sharing the float gradients with that process moves them to memory that is not pinned, which
      is how a boundary's float copies go; without overlap they are pinned.
    - New weights are cast on the host into memory that is not pinned, as PyTorch's blocking copy
      between dtypes does.
    - Selections are left out: they are rare.
    """

    def __init__(
        self,
        machine: Machine,
        costs: StepCosts,
        *,
        topk_ratio: float = 0.1,
        update_interval: int = 4,
        overlap: bool = True,
        reserved_cores: float = 0.5,
        clip_bytes: float = 8.0,
        snapshot_bytes: float = 4.0,
    ) -> None:
        """Split the host's cores.

        Args:
            machine: What it runs on.
            costs: Of one step of the model.
            topk_ratio: Share of each matrix's columns that the device updates.
            update_interval: Micro-batches of a window, S.
            overlap: Whether the update runs behind the next window.
            reserved_cores: Share of the cores that stays with the training process if it does.
            clip_bytes: Bytes of DRAM for an element that is unscaled and clipped: a product in
                place. The norm comes from the device.
            snapshot_bytes: Bytes of DRAM for an element of the worker's copy of the new master,
                beside AdamW's own 28. 4 if the master is still in cache, else 8: not known.

        Raises:
            ConfigError: Options are out of range; the message lists all.
        """
        super().__init__(machine, offload_hooks(costs))
        raise_violations(
            "deepspeed_zenflow", _violations(topk_ratio, update_interval, reserved_cores)
        )
        self._topk_ratio, self._interval, self._overlap = topk_ratio, update_interval, overlap
        self._clip_bytes, self._snapshot_bytes = clip_bytes, snapshot_bytes
        self._share = costs.num_params / self.devices
        # What its kernel reaches by itself is not known, unlike ZeRO-Offload's.
        machine.host_kind = machine.bounded_host(step_rate(machine.hardware.host))
        self._worker_kind = self._main_kind = machine.host_kind
        self._main = machine.host
        if overlap:
            cores = machine.rates.host
            self._worker_kind = _at_most(machine.host_kind, (1 - reserved_cores) * cores)
            self._main_kind = _at_most(machine.host_kind, reserved_cores * cores)
            self._main = HostLane("main", machine.network, machine.recording)
        self._in_flight: list[simpy.Event] = []
        self._stalled = 0.0

    def _step(self, step: int) -> Step:
        machine, count = self.machine, self.costs.accumulation
        self._stalled = 0.0
        for micro_step in range((step - 1) * count, step * count):
            is_first = micro_step % self._interval == 0
            is_boundary = (micro_step + 1) % self._interval == 0
            self.forward(step)
            yield from self._backward(step, is_first=is_first, is_boundary=is_boundary)
            yield machine.compute("step", self.step_overhead, step)
            if is_boundary:
                yield from self._end_window(step)
        return machine.env.now - self._stalled

    def _backward(self, step: int, *, is_first: bool, is_boundary: bool) -> Process:
        """Run one backward: behind each segment all that happens to its gradients, in turn."""
        machine, size = self.machine, self.costs.dtype_bytes
        for index, segment in reversed(list(enumerate(self.costs.segments))):
            passed = self.backward_of(index, step)
            important = self._important(segment)
            reduced = machine.collective("reduce", 2 * segment.numel * size, step, passed)
            spread = machine.collective("broadcast", important * size, step, reduced)
            yield passed
            yield from self._idle([spread], "reduce", step)
            if not is_boundary:
                yield machine.compute("step", self.update_seconds(important), step)
            yield from self._copy(segment, step, is_first=is_first, is_boundary=is_boundary)

    def _copy(self, segment: Segment, step: int, *, is_first: bool, is_boundary: bool) -> Process:
        """Add a segment's gradients to the sum on the host, by way of the device."""
        machine, share = self.machine, segment.numel / self.devices
        size = share * self.costs.dtype_bytes
        copied: list[simpy.Event] = []
        if not is_first:  # the device adds to the sum so far
            copied = [machine.h2d.submit("accumulator", step, machine.up(size))]
        copied = [machine.d2h.submit("grads", step, machine.down(size), copied)]
        if is_boundary:
            work = machine.down(share * FLOAT_BYTES)
            if self._overlap:
                work = machine.pageable(work)
            copied = [machine.d2h.submit("grads", step, work, copied)]
        yield from self._idle(copied, "d2h", step)

    def _important(self, segment: Segment) -> float:
        """Return the elements that every device updates itself, all vectors included."""
        return self._topk_ratio * (segment.numel - segment.vectors) + segment.vectors

    def _end_window(self, step: int) -> Process:
        """Fetch the last update's weights, hand this window over, update important columns."""
        machine = self.machine
        if self._overlap:
            if self._in_flight:  # at the first boundary there is nothing to fetch
                yield from self._idle(self._in_flight, "host", step)
                yield from self._fetch(step)
            yield from self._clip(step)
            work = self._host_work(28 + self._snapshot_bytes, self._worker_kind)
            self._in_flight = [machine.host.submit("adam", step, work)]
        else:
            yield from self._clip(step)
            work = self._host_work(28, self._worker_kind)
            yield from self._idle([machine.host.submit("adam", step, work)], "host", step)
            yield from self._fetch(step)
        important = sum(self._important(segment) for segment in self.costs.segments)
        yield machine.compute("step", self.update_seconds(important), step)

    def _clip(self, step: int) -> Process:
        work = self._host_work(self._clip_bytes, self._main_kind)
        yield from self._idle([self._main.submit("accumulate", step, work)], "host", step)

    def _fetch(self, step: int) -> Process:
        """Cast the host's weights, upload them, gather the other devices'."""
        machine, size = self.machine, self.costs.dtype_bytes
        cast = self._main.submit(
            "cast", step, self._host_work(FLOAT_BYTES + size, self._main_kind)
        )
        yield from self._idle([cast], "host", step)
        work = machine.pageable(machine.up(self._share * size))
        uploaded = machine.h2d.submit("params", step, work)
        yield from self._idle([self.gather(step, uploaded)], "h2d", step)

    def _host_work(self, bytes_each: float, kind: FlowKind) -> Work:
        """Return a pass over this device's part of the model."""
        return self.machine.host_work(self._share * bytes_each, kind=kind)

    def _idle(self, events: list[simpy.Event], cause: str, step: int) -> Process:
        self._stalled += yield from self.wait(events, cause, step)


def _at_most(kind: FlowKind, rate: float) -> FlowKind:
    """Return a flow kind with a largest rate, bytes/s: fewer cores."""
    return replace(kind, name=f"{kind.name} at {rate:g}", max_rate=min(kind.max_rate, rate))


def _violations(topk_ratio: float, interval: int, reserved_cores: float) -> Iterator[str]:
    if not 0 <= topk_ratio <= 1:
        yield f"topk_ratio must be in [0, 1], got {topk_ratio}: it is a share"
    if not (isinstance(interval, int) and interval >= 1):
        yield f"update_interval must be an integer >= 1, got {interval!r}: 'auto' is not modelled"
    if not 0 < reserved_cores < 1:
        yield f"reserved_cores must be in (0, 1), got {reserved_cores}: both processes need some"


def _memory(case: SystemCase) -> SystemParts:
    """Return the release's parts: 32 bytes with overlap, or 16, and 4 of 16-bit buffers.

    deepspeed/ops/adam/zenflow_cpu_adam.py and runtime/zenflow: a stale copy of the master, two
    gradient buffers and two sets of moments.
    """
    vectors = sum(p.numel for p in case.workload.parameters if len(p.shape) == 1)
    important = case.options["topk_ratio"] * (case.params - vectors) + vectors
    device = case.deepspeed_device(
        Part("important moments", "device", 2 * case.size * important, "in the model's dtype"),
        Part("important gradients", "device", 2 * case.size * important, "and a copy"),
    )
    copies = 2 if case.options["overlap"] else 1
    host = [
        Part("masters", "pageable", copies * FLOAT_BYTES * case.hosted),
        Part("moments", "pageable", copies * 2 * FLOAT_BYTES * case.hosted, f"sets: {copies}"),
        Part("gradients", "pageable", copies * FLOAT_BYTES * case.hosted, f"buffers: {copies}"),
        *case.pinned("staging", case.size),
    ]
    if case.options["update_interval"] > 1:
        host += case.pinned("accumulators", case.size)
    return device, host


DEEPSPEED_ZENFLOW = System(
    name="deepspeed_zenflow",
    rule="the release's own rule, not AdamW's moments",
    schedule=DeepSpeedZenFlow,
    memory=_memory,
)
