"""ZeRO stage 2 without offload as released: DeepSpeed 0.19, stage_1_and_2.py.

Gradients are reduced in buckets, on the stream that computes unless `overlap_comm` is on, which
below stage 3 it is not by default. A bucket goes to all devices, and each keeps its part. The step
has passes of its own over each device's gradients before AdamW's.
"""

from __future__ import annotations

import simpy

from sim.machine import Machine
from sim.memory.parts import FLOAT_BYTES, STATE_BYTES, Part, SystemCase, SystemParts
from sim.schedules.schedule import AbstractSchedule, Step, System, refuse_below_1
from sim.timing.costs import StepCosts
from sim.timing.framework import (
    REDUCE_BUCKET,
    deepspeed_hooks,
    non_finite_bytes,
    norm_bytes,
    plain_launch_seconds,
)

_STEP_KERNELS = 9
"""Kernels of a step for each parameter of a device's part: seven look for what is not finite, two
take its norm."""


class DeepSpeedZero2(AbstractSchedule):
    """Forward, backward with a bucket's all-reduce where one is full, passes, AdamW, all-gather."""

    def __init__(
        self,
        machine: Machine,
        costs: StepCosts,
        *,
        overlap_comm: bool = False,
        bucket_elements: int = REDUCE_BUCKET,
    ) -> None:
        """Take DeepSpeed's options.

        Args:
            machine: What it runs on.
            costs: Of one step of the model.
            overlap_comm: Whether reductions run behind backward.
            bucket_elements: Elements of gradients that are reduced together, `reduce_bucket_size`.

        Raises:
            ConfigError: The size is below 1.
        """
        # Each device's part is copied out of the bucket once more.
        own = 2.0 * costs.dtype_bytes
        costs = deepspeed_hooks(
            costs, own_bytes=own, own_kernels=1, bucket_elements=bucket_elements
        )
        super().__init__(machine, costs)
        refuse_below_1("bucket_elements", bucket_elements)
        self._overlaps, self._bucket = overlap_comm, bucket_elements

    def _step(self, step: int) -> Step:
        machine, waited = self.machine, 0.0
        for _ in range(self.costs.accumulation):
            self.forward(step)
            waited += yield from self._backward(step)
        updated = machine.compute("step", self._step_seconds(), step)
        yield updated
        waited += yield from self.wait([self.gather(step, updated)], "gather", step)
        return machine.env.now - waited

    def _backward(self, step: int) -> Step:
        """Run a micro-batch's backward; the result is the seconds in which the device waits."""
        waited, size = 0.0, 0.0
        reduced: list[simpy.Event] = []
        for index, segment in reversed(list(enumerate(self.costs.segments))):
            passed = self.backward_of(index, step)
            size += segment.numel
            if size < self._bucket and index:
                continue
            whole = 2 * size * self.costs.dtype_bytes
            reduced.append(self.machine.collective("reduce", whole, step, passed))
            size = 0.0
            if not self._overlaps or not index:
                yield passed
                waited += yield from self.wait(reduced, "reduce", step)
        return waited

    def _step_seconds(self) -> float:
        """Return the seconds of a step on the device, its all-gather aside.

        Gradients are looked at and their norm is taken. They are flattened, cast to float32 and
        unscaled. Behind AdamW masters are cast to the model's type.
        """
        size, share = self.costs.dtype_bytes, self.costs.num_params / self.devices
        moved = non_finite_bytes(size) + norm_bytes(size)
        moved += 2.0 * size + (size + FLOAT_BYTES) + 2.0 * FLOAT_BYTES + (FLOAT_BYTES + size)
        seconds = share * moved / self.costs.elementwise_bandwidth
        device = self.costs.hardware.device
        if not device.is_cpu:
            count = sum(segment.num_parameters for segment in self.costs.segments) / self.devices
            seconds = max(seconds, count * _STEP_KERNELS * plain_launch_seconds(device))
        return self.step_overhead + seconds + self.update_seconds(share)


def _memory(case: SystemCase) -> SystemParts:
    """Return whole weights, each device's part of gradients and states, and the buckets.

    A step holds the part's gradients in float32 beside those in the model's type.
    """
    state = STATE_BYTES if case.size < FLOAT_BYTES else STATE_BYTES - FLOAT_BYTES
    share = case.params / case.total
    device = case.deepspeed_device(
        Part("optimizer state", "device", state * share),
        Part("gradients", "device", case.size * share, "this device's part of them"),
        Part("float gradients", "device", FLOAT_BYTES * share, "of the step"),
        buckets=2 if case.options["overlap_comm"] else 1,
    )
    return device, []


DEEPSPEED_ZERO2 = System(
    name="deepspeed_zero2",
    rule="AdamW exactly",
    schedule=DeepSpeedZero2,
    memory=_memory,
)
