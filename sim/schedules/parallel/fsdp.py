"""Sharded weights, gradients and states: FSDP2 and ZeRO-3, with and without offload.

Each device holds an equal part of every layer (`sim.schedules.parallel.sharded`). The part's home
is the device, or the host. FSDP2's `CPUOffloadPolicy` and ZeRO-3 with `offload_param` keep
weights, gradients and states there, ZeRO-3 with `offload_optimizer` the last two.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Literal, get_args

import simpy

from sim.machine import Machine, Process
from sim.memory.parts import FLOAT_BYTES, STATE_BYTES, DeviceParts, Part, SystemCase, SystemParts
from sim.schedules.parallel.sharded import ShardedPasses
from sim.schedules.schedule import AbstractSchedule, Step, System, Waits
from sim.timing.costs import StepCosts
from sim.timing.framework import fsdp2_hooks, optimizer_seconds
from zenflow.config import raise_violations

Offload = Literal["none", "optimizer", "all"]
"""What lies on the host: nothing; gradients and states; weights, too."""


class FullyShardedDataParallel(AbstractSchedule):
    """Passes with all-gathers and reduce-scatters, then AdamW over each device's own part.

    With offload gradients go to the host behind their reduce-scatters, where those of later
    micro-batches are added, and the CPU's AdamW follows the last. New weights go up at once, or
    where all is on the host layer by layer in each pass that uses them.
    """

    def __init__(
        self,
        machine: Machine,
        costs: StepCosts,
        *,
        reshard_after_forward: bool = True,
        prefetch: int = 1,
        offload: Offload = "none",
        float32_reduce: bool = False,
        optimizer: str = "fused",
    ) -> None:
        """Share every layer out.

        Args:
            machine: What it runs on.
            costs: Of one step of the model.
            reshard_after_forward: Whether layers are dropped behind forward: ZeRO-3. Without it
                all weights stay whole until the end of backward, which is ZeRO-2's traffic.
            prefetch: Number of layers whose all-gathers run ahead; FSDP2 does so by 1.
            offload: What lies on the host.
            float32_reduce: Whether gradients are reduced in float32.
            optimizer: Implementation of AdamW on the device, a key of
                `sim.timing.framework.OPTIMIZERS`.

        Raises:
            ConfigError: An option is out of its range.
        """
        reduce_bytes = FLOAT_BYTES if float32_reduce else costs.dtype_bytes
        costs = fsdp2_hooks(costs, reshards=reshard_after_forward, reduce_bytes=reduce_bytes)
        super().__init__(machine, costs)
        raise_violations("fsdp2", _violations(prefetch, offload))
        self._offload = offload
        self._share = costs.num_params / self.devices
        self._update_seconds = optimizer_seconds(costs, optimizer, self.devices)
        self._waits = Waits(machine)
        self._passes = ShardedPasses(
            machine,
            costs,
            self._waits,
            reshards=reshard_after_forward,
            prefetch=prefetch,
            reduce_bytes=reduce_bytes,
            fetches=offload == "all",
        )

    def _step(self, step: int) -> Step:
        machine = self.machine
        self._waits.seconds = 0.0
        left: list[simpy.Event] = []
        for micro_batch in range(self.costs.accumulation):
            self._passes.begin()
            self._passes.forward(step)
            behind = functools.partial(self._leave, step=step, is_first=not micro_batch, left=left)
            passed, reduced = self._passes.backward_all(step, behind)
        yield passed
        since = machine.env.now
        yield from self.wait([reduced], "reduce", step)
        began = machine.env.now
        seconds = self.step_overhead
        if self._offload == "none":
            seconds += self._update_seconds
        yield machine.compute("step", seconds, step)
        since += machine.env.now - began  # it works meanwhile
        if self._offload != "none":
            yield from self.wait(left, "d2h", step)
            yield from self._update(step)
        return since - self._waits.seconds

    def _leave(
        self,
        unit: int,
        reduced: simpy.Event,
        *,
        step: int,
        is_first: bool,
        left: list[simpy.Event],
    ) -> None:
        """Send a layer's reduced gradients to the host, if that is their home."""
        if self._offload == "none":
            return
        machine, size = self.machine, self.costs.dtype_bytes
        segments = [self.costs.segments[index] for index in self._passes.units[unit]]
        share = sum(segment.numel for segment in segments) / self.devices
        copied = machine.d2h.submit("grads", step, machine.down(share * size), [reduced])
        if not is_first:  # to the sum so far
            work = machine.host_work(3 * share * size)
            copied = machine.host.submit("accumulate", step, work, [copied])
        left.append(copied)

    def _update(self, step: int) -> Process:
        machine, size = self.machine, self.costs.dtype_bytes
        work = machine.host_work(self._share * (2 * STATE_BYTES + 2 * size))
        yield from self.wait([machine.host.submit("adam", step, work)], "host", step)
        if self._offload == "optimizer":
            uploaded = machine.h2d.submit("params", step, machine.up(self._share * size))
            yield from self.wait([uploaded], "h2d", step)


def _violations(prefetch: int, offload: str) -> Iterator[str]:
    if prefetch < 0:
        yield f"prefetch is a number of layers >= 0, got {prefetch}"
    if offload not in get_args(Offload):
        yield f"offload must be one of {', '.join(get_args(Offload))}, got {offload!r}"


def sharded_device(case: SystemCase, *more: Part, reshards: bool, prefetch: int = 1,
                   reduce_bytes: int | None = None, keeps_weights: bool = True,
                   keeps_gradients: bool = True) -> DeviceParts:  # fmt: skip
    """Return the parts of a device that holds an equal part of every layer.

    Layers in use are whole: this one, those that run ahead, and the last one, which stays from
    forward to backward. Whole gradients are there of the layer at work and of the one before it,
    whose reduce-scatter is under way.

    Args:
        case: Workload and machine.
        more: Parts beside weights and gradients.
        reshards: Whether layers are dropped behind forward.
        prefetch: Number of layers whose all-gathers run ahead.
        reduce_bytes: Bytes of an element of reduced gradients; None is the model's own.
        keeps_weights: Whether the device's part of the weights lies on the device.
        keeps_gradients: The same of gradients.
    """
    sizes = [float(layer.numel) for layer in case.workload.layers]
    gathered = (1 + prefetch) * max(sizes) + sizes[-1] if reshards else case.params
    own = case.size * case.params / case.total if keeps_weights else 0.0
    leaving = case.in_flight
    kept = (reduce_bytes or case.size) * case.params / case.total if keeps_gradients else 0.0
    is_whole = case.total == 1 and keeps_weights  # then a part is the layer itself
    return DeviceParts(
        always=[
            Part("weights", "device", own, "this device's part of them"),
            Part(
                "layers in use",
                "device",
                0.0 if is_whole else case.size * min(case.params, gathered),
                "gathered from all devices",
            ),
            *more,
        ],
        in_flight=leaving,
        gradients_before=kept if case.workload.accumulation > 1 else 0.0,
        gradients_after=max(leaving, kept) if case.total == 1 else leaving + kept,
        gradients_at_step=kept,
    )


def _memory(case: SystemCase) -> SystemParts:
    """Return equal parts of weights, gradients and states, in their homes, and layers in use."""
    options = case.options
    offload = options["offload"]
    state = STATE_BYTES if case.size < FLOAT_BYTES else STATE_BYTES - FLOAT_BYTES
    on_device = state * case.params / case.total if offload == "none" else 0.0
    device = sharded_device(
        case,
        Part("optimizer state", "device", on_device),
        reshards=options["reshard_after_forward"],
        prefetch=options["prefetch"],
        reduce_bytes=FLOAT_BYTES if options["float32_reduce"] else None,
        keeps_weights=offload != "all",
        keeps_gradients=offload == "none",
    )
    return device, [] if offload == "none" else case.offloaded()


FSDP2 = System(
    name="fsdp2",
    rule="AdamW exactly",
    schedule=FullyShardedDataParallel,
    memory=_memory,
)
FSDP2_OFFLOAD = System(
    name="fsdp2_offload",
    rule="AdamW exactly",
    schedule=functools.partial(FullyShardedDataParallel, offload="all"),
    memory=_memory,
)
"""FSDP2 with `CPUOffloadPolicy`, or ZeRO-3 with `offload_param` and `offload_optimizer`."""
ZERO3_OFFLOAD = System(
    name="zero3_offload",
    rule="AdamW exactly",
    schedule=functools.partial(FullyShardedDataParallel, offload="optimizer"),
    memory=_memory,
)
"""ZeRO-3 with `offload_optimizer`."""
