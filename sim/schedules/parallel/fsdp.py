"""Sharded weights, gradients and states: FSDP2, and ZeRO-3 without offload.

Each device holds an equal part of every layer (`sim.schedules.parallel.sharded`). The part's home
is the device; or the host, where FSDP2's `CPUOffloadPolicy` keeps weights, gradients and states.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import simpy

from sim.machine import Machine, Process
from sim.memory_parts import (
    FLOAT_BYTES,
    DeviceParts,
    Part,
    SystemCase,
    SystemParts,
    rounded,
)
from sim.schedules.parallel.optimizer_memory import optimizer_part
from sim.schedules.parallel.sharded import ShardedPasses
from sim.schedules.schedule import AbstractSchedule, Step, System, Waits
from sim.timing.costs import StepCosts
from sim.timing.framework import OPTIMIZERS, fsdp2_hooks, optimizer_seconds
from sim.timing.host_optimizers import optimizer_works
from zenflow.config import raise_violations, unknown_name


class FullyShardedDataParallel(AbstractSchedule):
    """Passes with all-gathers and reduce-scatters, then AdamW over each device's own part.

    With offload gradients go to the host behind their reduce-scatters, where those of later
    micro-batches are added, and the CPU's AdamW follows the last. Weights go up layer by layer in
    each pass that uses them. Under mixed precision the host has them in float32 and so they go,
    and gradients too: both are cast on the device.
    """

    def __init__(
        self,
        machine: Machine,
        costs: StepCosts,
        *,
        reshard_after_forward: bool = True,
        prefetch: int = 1,
        offload: bool = False,
        float32_reduce: bool = False,
        float32_master: bool = True,
        optimizer: str | None = None,
        sync_each_batch: bool = True,
        tables_apart: bool = False,
        clipping: bool = False,
    ) -> None:
        """Share every layer out.

        Args:
            machine: What it runs on.
            costs: Of one step of the model.
            reshard_after_forward: Whether layers are dropped behind forward: ZeRO-3. Without it
                all weights stay whole until the end of backward, which is ZeRO-2's traffic.
            prefetch: Number of layers whose all-gathers run ahead; FSDP2 does so by 1.
            offload: Whether weights, gradients and states lie on the host.
            float32_reduce: Whether gradients are reduced in float32.
            float32_master: Whether weights, gradients and moments are float32 in their home, as
                under mixed precision; without, they have the model's type.
            optimizer: Implementation of AdamW, a key of `sim.timing.framework.OPTIMIZERS`. None is
                ``fused`` on the device, and on the host PyTorch's default there, ``loop``.
            sync_each_batch: Whether every micro-batch's gradients are reduced. Accelerate and
                transformers' Trainer reduce the last one's alone, unless told so by this name:
                then whole gradients wait on every device.
            tables_apart: Whether embedding and output layer are sharded by themselves. Else they
                are the root's, which FSDP2 keeps whole from forward to backward: so it is where
                `fully_shard` takes every layer, and then the model. Memory alone depends on it.
            clipping: Whether gradients are clipped on the host, where their home is. On the device
                that is not counted.

        Raises:
            ConfigError: An option is out of its range.
        """
        del tables_apart
        reduce_bytes = FLOAT_BYTES if float32_reduce else costs.dtype_bytes
        costs = self._hooked(costs, reshards=reshard_after_forward, reduce_bytes=reduce_bytes)
        super().__init__(machine, costs)
        optimizer = optimizer or ("loop" if offload else "fused")
        raise_violations("fsdp2", _violations(prefetch, optimizer))
        self._offload, self._syncs_each = offload, sync_each_batch
        self._share = costs.num_params / self.devices
        self._width = FLOAT_BYTES if float32_master else costs.dtype_bytes
        self._update_seconds = optimizer_seconds(costs, optimizer, self.devices, self._width)
        self._optimizer, self._clips = optimizer, clipping
        self._waits = Waits(machine)
        self._passes = ShardedPasses(
            machine,
            costs,
            self._waits,
            reshards=reshard_after_forward,
            prefetch=prefetch,
            reduce_bytes=reduce_bytes,
            fetch_bytes=self._width if offload else 0,
        )

    def _hooked(self, costs: StepCosts, *, reshards: bool, reduce_bytes: int) -> StepCosts:
        """Return the costs with what the framework does around each layer."""
        return fsdp2_hooks(costs, reshards=reshards, reduce_bytes=reduce_bytes)

    def _step(self, step: int) -> Step:
        machine = self.machine
        self._waits.seconds = 0.0
        left: list[simpy.Event] = []
        last = self.costs.accumulation - 1
        for micro_batch in range(self.costs.accumulation):
            self._passes.begin()
            self._passes.forward(step)
            reduces = self._syncs_each or micro_batch == last
            behind = functools.partial(self._leave, step=step, micro_batch=micro_batch, left=left)
            passed, reduced = self._passes.backward_all(
                step, behind if reduces else None, reduces=reduces
            )
        yield passed
        since = machine.env.now
        yield from self.wait([reduced], "reduce", step)
        began = machine.env.now
        seconds = self.step_overhead
        if not self._offload:
            seconds += self._update_seconds
        yield machine.compute("step", seconds, step)
        since += machine.env.now - began  # it works meanwhile
        if self._offload:
            yield from self.wait(left, "d2h", step)
            yield from self._update(step)
        return since - self._waits.seconds

    def _leave(
        self,
        unit: int,
        reduced: simpy.Event,
        *,
        step: int,
        micro_batch: int,
        left: list[simpy.Event],
    ) -> None:
        """Send a layer's reduced gradients to the host, if that is their home."""
        if not self._offload:
            return
        machine, size = self.machine, self._numel_of(unit) / self.devices * self._width
        copied = machine.d2h.submit("grads", step, machine.down(size), [reduced])
        if micro_batch and self._syncs_each:  # to the sum so far
            work = machine.host_work(3 * size)
            copied = machine.host.submit("accumulate", step, work, [copied])
        left.append(copied)

    def _numel_of(self, unit: int) -> int:
        """Return the elements of a whole layer."""
        return sum(self.costs.segments[index].numel for index in self._passes.units[unit])

    def _update(self, step: int) -> Process:
        works = optimizer_works(
            self.machine, self.costs, self._optimizer, self._width, clips=self._clips
        )
        for name, work in works:
            yield from self.wait([self.machine.host.submit(name, step, work)], "host", step)


def _violations(prefetch: int, optimizer: str) -> Iterator[str]:
    if prefetch < 0:
        yield f"prefetch is a number of layers >= 0, got {prefetch}"
    if optimizer not in OPTIMIZERS:
        yield f"optimizer {unknown_name(optimizer, OPTIMIZERS)}"


def sharded_device(case: SystemCase, *more: Part, reshards: bool, prefetch: int = 1,
                   tables_apart: bool = False, weight_bytes: int | None = None,
                   gradient_bytes: int | None = None) -> DeviceParts:  # fmt: skip
    """Return the parts of a device that holds an equal part of every layer.

    Layers in use are whole: this one, those that run ahead, and the embedding and the output layer
    throughout. Where these are apart, layers that follow one another are there together. Whole
    gradients are there of the layer at work and of the one before it, whose reduce-scatter is
    under way.

    Args:
        case: Workload and machine.
        more: Parts beside weights and gradients.
        reshards: Whether layers are dropped behind forward.
        prefetch: Number of layers whose all-gathers run ahead.
        tables_apart: Whether embedding and output layer are dropped behind their use, too.
        weight_bytes: Bytes of an element of the device's part of the weights; None is the model's
            own, 0 a part that lies elsewhere.
        gradient_bytes: The same of gradients.
    """
    sizes = [float(layer.numel) for layer in case.workload.layers]
    leaving, gathered = case.in_flight, case.params
    if reshards and tables_apart:
        gathered = _largest_run(sizes, 1 + prefetch)
        leaving = case.size * min(case.params, _largest_run(sizes, 2))
    elif reshards:
        gathered = sizes[0] + sizes[-1] + _largest_run(sizes[1:-1], 1 + prefetch)
    part = case.params / case.total
    own = case.size if weight_bytes is None else weight_bytes
    kept = (case.size if gradient_bytes is None else gradient_bytes) * part
    is_whole = case.total == 1 and own == case.size  # then a part is the layer itself
    in_use = 0.0 if is_whole else case.size * min(case.params, gathered)
    return DeviceParts(
        always=[Part("weights", "device", own * part, "this device's part of them"), *more],
        passes=[Part("layers in use", "device", in_use, "gathered from all devices")],
        in_flight=leaving,
        gradients_before=kept if case.workload.accumulation > 1 else 0.0,
        gradients_after=max(leaving, kept) if case.total == 1 else leaving + kept,
        gradients_at_step=kept,
    )


def _largest_run(sizes: Sequence[float], count: int) -> float:
    """Return the largest sum of so many neighbours.

    >>> _largest_run([5, 1, 2, 4], 2)
    6
    """
    return max((sum(sizes[first : first + count]) for first in range(len(sizes))), default=0.0)


def _memory(case: SystemCase) -> SystemParts:
    """Return equal parts of weights, gradients and states, in their homes, and layers in use.

    FSDP2's parameters are the masters: float32, as their gradients are, and layers are cast as
    they are gathered. Without masters all of it has the model's type.
    """
    options, part = case.options, case.params / case.total
    offload, width = options["offload"], case.width
    device = sharded_device(
        case,
        Part("moments", "device", 0.0 if offload else 2.0 * width * part),
        reshards=options["reshard_after_forward"],
        prefetch=options["prefetch"],
        tables_apart=options["tables_apart"],
        weight_bytes=0 if offload else width,
        gradient_bytes=0 if offload else width,
    )
    if not options["sync_each_batch"] and case.workload.accumulation > 1:
        each = FLOAT_BYTES if options["float32_reduce"] else case.size
        added = max(layer.numel for layer in case.workload.layers)
        device = replace(device, gradients_before=each * (case.params + added))
    if not offload:
        fused = {**options, "optimizer": options["optimizer"] or "fused"}
        return replace(device, step=[optimizer_part(replace(case, options=fused), part)]), []
    layer = max(layer.numel for layer in case.workload.layers) / case.total
    arriving = Part(
        "weights on their way", "device", 2 * width * layer, "before they are gathered"
    )
    device = replace(device, always=[*device.always, arriving])
    return device, [
        *_pinned(case, "weights", width),
        *_pinned(case, "gradients", width),
        Part("moments", "pageable", 2 * width * case.hosted),
    ]


def _pinned(case: SystemCase, name: str, width: int) -> list[Part]:
    """Return each device's part of every parameter in pinned memory of its own."""
    parts = [width * parameter.numel / case.total for parameter in case.workload.parameters]
    more = sum(rounded(part) - part for part in parts)
    return [
        Part(name, "pinned", case.count * sum(parts)),
        Part(f"rounding of {name}", "pinned", case.count * more, "each to a power of two"),
    ]


FSDP2 = System(
    name="fsdp2",
    rule="AdamW exactly",
    schedule=FullyShardedDataParallel,
    memory=_memory,
)
FSDP2_OFFLOAD = System(
    name="fsdp2_offload",
    rule="AdamW exactly",
    schedule=functools.partial(FullyShardedDataParallel, offload=True),
    memory=_memory,
)
"""PyTorch's FSDP2 with `CPUOffloadPolicy`."""
