"""ZeRO stage 2 without offload as released: DeepSpeed 0.19, stage_1_and_2.py.

Gradients are reduced in buckets, on the stream that computes unless `overlap_comm` is on, which
below stage 3 it is not by default. A bucket goes to all devices, and each keeps its part. The step
has passes of its own over each device's gradients before AdamW's.
"""

from __future__ import annotations

from dataclasses import replace

import simpy

from sim.machine import Machine
from sim.memory_parts import (
    FLOAT_BYTES,
    REDUCE_BUCKET,
    STATE_BYTES,
    Part,
    SystemCase,
    SystemParts,
)
from sim.schedules.parallel.optimizer_memory import optimizer_part
from sim.schedules.schedule import AbstractSchedule, Step, System, refuse_below_1
from sim.timing.costs import StepCosts
from sim.timing.framework import (
    deepspeed_hooks,
    is_added,
    non_finite_bytes,
    norm_bytes,
    optimizer_kernels,
    plain_launch_seconds,
)

_STEP_KERNELS = 9
"""Kernels of a step for each parameter of a device's part: seven look for what is not finite, two
take its norm."""


class DeepSpeedZero2(AbstractSchedule):
    """Forward, backward with an all-reduce for each full bucket, passes, AdamW, all-gather."""

    def __init__(
        self,
        machine: Machine,
        costs: StepCosts,
        *,
        overlap_comm: bool = False,
        bucket_elements: int = REDUCE_BUCKET,
        optimizer: str = "fused",
    ) -> None:
        """Take DeepSpeed's options.

        Args:
            machine: What it runs on.
            costs: Of one step of the model.
            overlap_comm: Whether reductions run behind backward.
            bucket_elements: Elements of gradients that are reduced together, `reduce_bucket_size`.
            optimizer: Implementation of AdamW, a key of `sim.timing.framework.OPTIMIZERS`.

        Raises:
            ConfigError: The size is below 1, or there is no such implementation.
        """
        # Each device's part is copied out of the bucket once more.
        own = 2.0 * costs.dtype_bytes
        costs = deepspeed_hooks(
            costs, own_bytes=own, own_kernels=1, bucket_elements=bucket_elements
        )
        super().__init__(machine, costs)
        refuse_below_1("bucket_elements", bucket_elements)
        self._overlaps, self._bucket = overlap_comm, bucket_elements
        self._update = optimizer_kernels(optimizer).moved / optimizer_kernels("fused").moved

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
        costs, share = self.costs, self.costs.num_params / self.devices
        seconds = self.step_overhead + self._update * self.update_seconds(share)
        if not is_added(costs):
            return seconds
        size, device = costs.dtype_bytes, costs.hardware.device
        moved = non_finite_bytes(size) + norm_bytes(size)
        moved += 2.0 * size + (size + FLOAT_BYTES) + 2.0 * FLOAT_BYTES + (FLOAT_BYTES + size)
        launched = _STEP_KERNELS * sum(s.num_parameters for s in costs.segments) / self.devices
        return seconds + max(
            share * moved / costs.elementwise_bandwidth, launched * plain_launch_seconds(device)
        )


def _memory(case: SystemCase) -> SystemParts:
    """Return whole weights, each device's part of gradients and states, and the buckets.

    Buckets are dropped when backward ends.
    """
    share, bucket = case.params / case.total, case.options["bucket_elements"] * case.size
    leaving = min(case.in_flight, bucket) + (2 if case.options["overlap_comm"] else 1) * bucket
    own = case.size * share
    device = case.device(
        Part("optimizer state", "device", STATE_BYTES * share),
        in_flight=leaving,
        after=own + leaving,
    )
    return replace(
        device,
        gradients_before=own if case.workload.accumulation > 1 else 0.0,
        gradients_at_step=0.0,
        step=step_parts(case, share, kept=own),
    ), []


def step_parts(case: SystemCase, share: float, kept: float) -> list[Part]:
    """Return the memory of a step for a flat tensor that it updates.

    Gradients are flattened, a copy, and cast to float32. Their buffers are dropped before AdamW
    starts.

    Args:
        case: Workload, machine and options.
        share: Elements of the tensor.
        kept: Bytes of its gradients beside the flat ones.
    """
    flat = case.size * share if case.size < FLOAT_BYTES else 0.0
    casts = Part("temporaries", "device", kept + flat, "of casts")
    update = optimizer_part(case, share, share)
    floats = Part("float gradients", "device", FLOAT_BYTES * share)
    return [floats, max(casts, update, key=lambda part: part.num_bytes)]


DEEPSPEED_ZERO2 = System(
    name="deepspeed_zero2",
    rule="AdamW exactly",
    schedule=DeepSpeedZero2,
    memory=_memory,
)
