"""ZeRO stage 3 as released: DeepSpeed 0.19, stage3.py, partitioned_param_coordinator.py.

Its passes are simulated as FSDP2's. Hooks, copies, step and memory are its own.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Literal, get_args

import simpy

from sim.machine import Machine, Process
from sim.memory_parts import (
    DOUBLE_BYTES,
    FLOAT_BYTES,
    REDUCE_BUCKET,
    STATE_BYTES,
    DeviceParts,
    Part,
    SystemCase,
    SystemParts,
)
from sim.schedules.parallel.deepspeed_zero2 import step_parts
from sim.schedules.parallel.fsdp import FullyShardedDataParallel
from sim.schedules.schedule import System, refuse_below_1
from sim.schedules.systems.deepspeed_zero_offload import RELEASED, around_rate
from sim.timing.costs import StepCosts
from sim.timing.framework import zero3_hooks
from sim.timing.host_optimizers import KEPT_BYTES
from zenflow.errors import ConfigError

Offload = Literal["none", "optimizer", "all"]
"""Data that lies on the host: nothing; gradients and states; weights, too."""
SUB_GROUP = 1_000_000_000
"""Elements of DeepSpeed's default ``sub_group_size``, which are updated together."""
_REUSE_DISTANCE = 1_000_000_000
"""Elements of DeepSpeed's default ``stage3_max_reuse_distance``: weights that are used again
sooner stay whole."""
_PREFETCHED = 50_000_000
"""Elements of DeepSpeed's default ``stage3_prefetch_bucket_size``: so many are gathered ahead, in
one all-gather."""
_NORM_BUFFER = 250_000_000
"""Elements of which DeepSpeed takes a norm at a time."""


class DeepSpeedZero3(FullyShardedDataParallel):
    """Passes with all-gathers and reduce-scatters, then AdamW over each device's own part.

    With offload:

    - Sums of gradients lie on the host in the model's type (`partition_grads`). Every micro-batch
      copies its own down, and then up again; from the second on the sum comes up, and goes down.
      So each moves both ways once. The last one's also go down in float32, by a copy for which the
      host waits, and with it backward: kernels are launched behind it (`partition_grads`, before
      deepspeedai/DeepSpeed #8207 of August 2026).
    - `step()` is ZeRO-Offload's on the host. New weights go up in one piece, or with
      `offload_param` in each pass. The piece is cast on the host into new memory, which is not
      pinned, and copied from there (`_reassign_or_swap_out_partitioned_parameters`).

    Gradients are reduced when a bucket is full, and not before. Layers are gathered in pieces of
    what is prefetched, each an all-gather with a latency of its own.
    """

    _together = float(_PREFETCHED)

    def __init__(
        self,
        machine: Machine,
        costs: StepCosts,
        *,
        offload: Offload = "none",
        reshard_after_forward: bool = True,
        bucket_elements: int = REDUCE_BUCKET,
        sub_group_elements: int = SUB_GROUP,
        optimizer: str = "fused",
        overlap_comm: bool = True,
        pin_memory: bool = True,
        waits_for_copies: bool = True,
    ) -> None:
        """Take DeepSpeed's options.

        Args:
            machine: What it runs on.
            costs: Of one step of the model.
            offload: What lies on the host.
            reshard_after_forward: Whether layers are gathered again in backward, in time.
            bucket_elements: Elements of gradients that are reduced together, `reduce_bucket_size`.
                Transformers' ``auto`` has the square of the hidden width.
            sub_group_elements: Elements that are updated together, `sub_group_size`, in memory.
            optimizer: Implementation of AdamW on the device, a key of
                `sim.timing.framework.OPTIMIZERS`.
            overlap_comm: Whether reductions and copies run behind backward, as by default.
            pin_memory: Whether the host's buffers are pinned, as in the files that people copy.
                DeepSpeed's own default was not until August 2026; then the host waits for every
                copy. Memory is counted as pinned.
            waits_for_copies: Whether the host waits for float32 gradients, as DeepSpeed did until
                August 2026.

        Raises:
            ConfigError: An option is out of its range.
        """
        if offload not in get_args(Offload):
            known = ", ".join(get_args(Offload))
            raise ConfigError(f"deepspeed_zero3: offload must be one of {known}, got {offload!r}")
        super().__init__(
            machine, costs, offload=offload != "none", optimizer=optimizer,
            reshard_after_forward=reshard_after_forward,
        )  # fmt: skip
        refuse_below_1("bucket_elements", bucket_elements)
        refuse_below_1("sub_group_elements", sub_group_elements)
        self._bucket = float(bucket_elements)
        self._overlaps, self._pins = overlap_comm, pin_memory
        self._waits_for_copies = waits_for_copies or not pin_memory
        self._uploads = offload == "optimizer"
        self._passes.fetch_bytes = costs.dtype_bytes if offload == "all" else 0
        self._around = machine.bounded_host(around_rate(machine.hardware.host))

    def _hooked(self, costs: StepCosts, *, reshards: bool, reduce_bytes: int) -> StepCosts:
        del reshards, reduce_bytes  # gradients are reduced in the model's type
        return zero3_hooks(costs)

    def _leave(
        self,
        elements: float,
        reduced: simpy.Event,
        *,
        step: int,
        micro_batch: int,
        left: list[simpy.Event],
    ) -> list[simpy.Event]:
        """Send reduced gradients to the host; return what the device waits for next."""
        if not self._offload:
            return [] if self._overlaps else [reduced]
        size = elements / self.devices * self.costs.dtype_bytes
        if micro_batch:
            done = self._down(size, step, self._up(size, step, reduced))
        else:
            done = self._up(size, step, self._down(size, step, reduced))
        is_last = micro_batch == self.costs.accumulation - 1
        if is_last:
            done = self._down(elements / self.devices * RELEASED.down, step, done)
        left.append(done)
        waits = not self._overlaps or not self._pins or (is_last and self._waits_for_copies)
        return [done] if waits else []

    def _down(self, size: float, step: int, after: simpy.Event) -> simpy.Event:
        """Queue the copy of gradients to the host."""
        work = self.machine.down(size)
        work = work if self._pins else self.machine.pageable(work)
        return self.machine.d2h.submit("grads", step, work, [after])

    def _up(self, size: float, step: int, after: simpy.Event) -> simpy.Event:
        """Queue the copy of the sum so far, or of what has just left, to the device."""
        work = self.machine.up(size)
        work = work if self._pins else self.machine.pageable(work)
        return self.machine.h2d.submit("accumulator", step, work, [after])

    def _update(self, step: int) -> Process:
        machine = self.machine
        for name, bytes_each, kind in (
            ("accumulate", RELEASED.prepare, self._around),
            ("adam", RELEASED.update, None),
            ("cast", RELEASED.convert, self._around),
        ):
            work = machine.host_work(self._share * bytes_each, kind=kind)
            yield from self.wait([machine.host.submit(name, step, work)], "host", step)
        if self._uploads:
            size = self._share * self.costs.dtype_bytes
            if size > KEPT_BYTES:
                pages = machine.host.submit("pages", step, machine.fresh_pages(size))
                yield from self.wait([pages], "host", step)
            work = machine.pageable(machine.up(size))
            yield from self.wait([machine.h2d.submit("params", step, work)], "h2d", step)


def _memory(case: SystemCase) -> SystemParts:
    """Return a device's part of everything, weights that are whole, and the bucket.

    - The bucket and a flat buffer of all gradients stay. A bucket is copied to be reduced.
    - Weights that are used again soon stay whole at the end of forward: the last half of the
      distance, which backward goes back over. Beside them there are a layer and what runs ahead.
    """
    options, size = case.options, case.size
    on_device, share = options["offload"] == "none", case.params / case.total
    largest = max(layer.numel for layer in case.workload.layers)
    whole = min(case.params, _REUSE_DISTANCE / 2 + largest + _PREFETCHED)
    bucket = float(options["bucket_elements"] * size)
    leaving = size * min(case.params, largest) + min(case.in_flight, bucket)
    inner = 0.0 if on_device else _copied(case, case.largest_inner)
    table = 0.0 if on_device else _copied(case, case.largest)
    leaving += inner
    own = 0.0 if options["offload"] == "all" else size * share
    device = DeviceParts(
        always=[
            Part("weights", "device", own, "this device's part of them"),
            Part("reduction buckets", "device", bucket),
        ],
        passes=[Part("layers in use", "device", size * whole, "gathered from all devices")],
        in_flight=leaving,
        gradients_after=leaving,
        gradients_at_step=0.0,
        copy_of_largest=table - inner,
    )
    if not on_device:
        return device, _host(case)
    states = [
        Part("optimizer state", "device", case.state_bytes * share),
        Part("gradient buffer", "device", size * share, "this device's part of them"),
    ]
    step = step_parts(case, min(share, options["sub_group_elements"]), kept=0.0)
    return replace(device, always=[*device.always, *states], step=step), []


def _copied(case: SystemCase, numel: int) -> float:
    """Return the bytes of a gradient's copies on its way to the host, one at a time.

    A device has a part of each parameter. Its norm is taken on a copy in float64, of so many
    elements at most (deepspeed/runtime/zero/stage3.py, `_constant_buffered_norm2`). Then it is
    cast to float32 on the device.
    """
    share = numel / case.total
    return max(DOUBLE_BYTES * min(share, _NORM_BUFFER), FLOAT_BYTES * share)


def _host(case: SystemCase) -> list[Part]:
    """Return the host's parts: masters, moments, gradients in float32 and in the model's type.

    Gradients are pinned: those of the model's type in one buffer, those in float32 in one for each
    sub-group (deepspeed/runtime/zero/stage3.py, `_setup_for_real_optimizer` and
    `initialize_optimizer_states`). Masters are not, unlike ZeRO-2's.
    """
    group = float(case.options["sub_group_elements"])
    parts = [
        Part("optimizer state", "pageable", STATE_BYTES * case.hosted, "masters, moments"),
        *case.pinned("float gradients", FLOAT_BYTES, together=group),
        *case.pinned("gradients", case.size),
    ]
    if case.options["offload"] == "all":
        parts += case.pinned("weights to upload", case.size)
    return parts


DEEPSPEED_ZERO3 = System(
    name="deepspeed_zero3",
    rule="AdamW exactly",
    schedule=DeepSpeedZero3,
    memory=_memory,
)
ZERO3_OFFLOAD = System(
    name="zero3_offload",
    rule="AdamW exactly",
    schedule=functools.partial(DeepSpeedZero3, offload="optimizer"),
    memory=_memory,
)
"""DeepSpeed's ZeRO-3 with `offload_optimizer`."""
