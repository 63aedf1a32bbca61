"""Data parallelism without sharding: PyTorch's DDP, each device with a whole AdamW of its own."""

from __future__ import annotations

from dataclasses import replace

import simpy

from sim.machine import Machine
from sim.memory_parts import FLOAT_BYTES, Part, SystemCase, SystemParts
from sim.schedules.parallel.optimizer_memory import optimizer_part
from sim.schedules.schedule import AbstractSchedule, Step, System, refuse_below_1
from sim.timing.costs import StepCosts
from sim.timing.framework import ddp_hooks, optimizer_seconds

BUCKET_BYTES = 25 * 2**20
"""Bytes at which a bucket of DDP is full, by default."""
FIRST_BUCKET_BYTES = 2**20
"""Bytes of DDP's first bucket, by default: the first average begins early."""


def buckets_of(costs: StepCosts, bucket_bytes: int | None = None) -> list[list[int]]:
    """Return the indices of the segments of each of DDP's buckets, in the order of backward.

    A bucket is full when its segments reach its size: a layer is the least that is reduced here,
    where DDP cuts large ones.

    Args:
        costs: Of one step of the model.
        bucket_bytes: Bytes at which each is full; None is DDP's default.
    """
    limit = FIRST_BUCKET_BYTES if bucket_bytes is None else bucket_bytes
    buckets: list[list[int]] = [[]]
    filled = 0
    for index in reversed(range(len(costs.segments))):
        if filled >= limit:
            buckets.append([])
            filled, limit = 0, BUCKET_BYTES if bucket_bytes is None else bucket_bytes
        buckets[-1].append(index)
        filled += costs.segments[index].numel * costs.dtype_bytes
    return buckets


class DistributedDataParallel(AbstractSchedule):
    """Forward, backward with an all-reduce of each bucket behind it, AdamW over the whole model.

    Gradients are reduced in the last micro-batch alone.
    """

    def __init__(
        self,
        machine: Machine,
        costs: StepCosts,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        optimizer: str = "fused",
        float32_master: bool = True,
    ) -> None:
        """Take DDP's bucket size, the optimizer's kernels and its type.

        Args:
            machine: What it runs on.
            costs: Of one step of the model.
            bucket_bytes: Bytes of gradients that are reduced together; DDP's default.
            optimizer: Implementation of AdamW, a key of `sim.timing.framework.OPTIMIZERS`.
            float32_master: Whether there are weights and moments in float32; without, AdamW
                updates the model's weights, with moments of their type.

        Raises:
            ConfigError: The size is below 1, or there is no such implementation.
        """
        super().__init__(machine, ddp_hooks(costs))
        refuse_below_1("bucket_bytes", bucket_bytes)
        self._buckets = buckets_of(costs, bucket_bytes)
        self._update_seconds = optimizer_seconds(
            costs, optimizer, 1, FLOAT_BYTES if float32_master else costs.dtype_bytes
        )

    def _step(self, step: int) -> Step:
        machine = self.machine
        for _ in range(self.costs.accumulation - 1):
            self.forward(step)
            self.backward(step)
        self.forward(step)
        reduced = self._reduce(step)
        yield self.computed
        since = machine.env.now
        yield from self.wait(reduced, "reduce", step)
        began = machine.env.now
        seconds = self.step_overhead + self._update_seconds
        yield machine.compute("step", seconds, step)
        return since + machine.env.now - began  # it works meanwhile

    def _reduce(self, step: int) -> list[simpy.Event]:
        """Queue the last backward; return the ends of its all-reduces."""
        reduced = []
        for bucket in self._buckets:
            for index in bucket:
                self.computed = self.backward_of(index, step)
            size = sum(self.costs.segments[index].numel for index in bucket)
            size *= 2 * self.costs.dtype_bytes
            reduced.append(self.machine.collective("reduce", size, step, self.computed))
        return reduced


def _memory(case: SystemCase) -> SystemParts:
    """Return whole states, gradients a second time in DDP's buckets, and what AdamW takes."""
    own = Part("optimizer state", "device", case.state_bytes * case.params)
    whole = case.size * case.params
    buckets = Part("reduction buckets", "device", whole if case.total > 1 else 0.0)
    device = case.device(own, buckets, after=whole)
    return replace(device, step=[optimizer_part(case, case.params)]), []


DDP = System(name="ddp", rule="AdamW exactly", schedule=DistributedDataParallel, memory=_memory)
