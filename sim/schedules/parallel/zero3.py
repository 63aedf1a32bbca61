"""ZeRO-3 with offload, as DeepSpeed 0.19 has released it: deepspeed/runtime/zero/stage3.py.

Weights are sharded as under FSDP2, whose passes and hooks stand for DeepSpeed's own. States lie on
the host (`offload_optimizer`), and weights too where `offload_param` is on.
"""

from __future__ import annotations

import functools

import simpy

from sim.machine import Machine, Process
from sim.memory.parts import FLOAT_BYTES, Part, SystemCase, SystemParts
from sim.schedules.parallel.fsdp import FullyShardedDataParallel, sharded_device
from sim.schedules.schedule import System
from sim.schedules.systems.deepspeed_zero_offload import RELEASED, around_rate
from sim.timing.costs import StepCosts


class ZeroStage3(FullyShardedDataParallel):
    """FSDP2's passes with DeepSpeed's copies and step.

    - Sums of gradients lie on the host in the model's type (`partition_grads`). Every micro-batch
      copies its own down, and then up again; from the second on the sum comes up, and goes down.
      So each moves both ways once. The last one's also go down in float32. Backward waits for none
      of it (`overlap_comm` is on by default in stage 3).
    - `step()` is ZeRO-Offload's on the host. New weights go up in one piece, or with
      `offload_param` in each pass.
    """

    def __init__(
        self,
        machine: Machine,
        costs: StepCosts,
        *,
        offload_param: bool = False,
        reshard_after_forward: bool = True,
        prefetch: int = 1,
        float32_reduce: bool = False,
    ) -> None:
        """Take DeepSpeed's `offload_param`, and options of the schedule it builds on.

        Raises:
            ConfigError: An option is out of its range.
        """
        super().__init__(
            machine, costs, offload=True, float32_master=False, prefetch=prefetch,
            reshard_after_forward=reshard_after_forward, float32_reduce=float32_reduce,
        )  # fmt: skip
        if not offload_param:
            self._passes.fetch_bytes = 0
        self._uploads = not offload_param
        self._around = machine.bounded_host(around_rate(machine.hardware.host))

    def _leave(
        self,
        unit: int,
        reduced: simpy.Event,
        *,
        step: int,
        micro_batch: int,
        left: list[simpy.Event],
    ) -> None:
        machine, part = self.machine, self._numel_of(unit) / self.devices
        size = part * self.costs.dtype_bytes
        down = functools.partial(machine.d2h.submit, "grads", step)
        up = functools.partial(machine.h2d.submit, "accumulator", step)
        if micro_batch:
            done = down(machine.down(size), [up(machine.up(size), [reduced])])
        else:
            done = up(machine.up(size), [down(machine.down(size), [reduced])])
        if micro_batch == self.costs.accumulation - 1:
            done = down(machine.down(part * RELEASED.down), [done])
        left.append(done)

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
            uploaded = machine.h2d.submit("params", step, machine.up(size))
            yield from self.wait([uploaded], "h2d", step)


def _memory(case: SystemCase) -> SystemParts:
    """Return layers in use on the device, and masters, moments and both gradients on the host."""
    options = case.options
    device = sharded_device(
        case,
        reshards=options["reshard_after_forward"],
        prefetch=options["prefetch"],
        reduce_bytes=FLOAT_BYTES if options["float32_reduce"] else None,
        keeps_weights=not options["offload_param"],
        keeps_gradients=False,
    )
    return device, [
        *case.pinned("masters", FLOAT_BYTES),
        *case.pinned("gradients", FLOAT_BYTES),
        *case.pinned("sums of gradients", case.size),
        *(case.pinned("weights", case.size) if options["offload_param"] else []),
        Part("moments", "pageable", 2 * FLOAT_BYTES * case.hosted),
    ]


ZERO3_OFFLOAD = System(
    name="zero3_offload",
    rule="AdamW exactly",
    schedule=ZeroStage3,
    memory=_memory,
)
