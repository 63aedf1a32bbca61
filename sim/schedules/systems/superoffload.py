"""Updates during backward and on both sides of a fast link: SuperOffload (Lian et al. 2025).

Also torchao's ``CPUOffloadOptimizer``, whose host updates all parameters while backward goes on.

The host updates the buckets whose gradients come first while backward goes on; the rest of the
parameters, whose gradients come last, is updated on the device. Casts run on the device, so that
float32 crosses the link both ways: cheap between the chips of a superchip, dear over PCIe.
"""

from __future__ import annotations

from functools import partial

import simpy

from sim.machine import Machine
from sim.memory_parts import FLOAT_BYTES, Part, SystemCase, SystemParts
from sim.schedules.schedule import AbstractSchedule, Step, System
from sim.timing.costs import StepCosts
from sim.timing.framework import zero3_hooks
from zenflow.errors import ConfigError

_Copied = tuple[float, simpy.Event]
"""Elements of a bucket, and the event of its gradient's arrival on the host."""

_STREAMS = 7
"""Numbers of DRAM for an element: gradient read, master and moments read and written. The master
itself goes up."""


class SuperOffload(AbstractSchedule):
    """The host's part behind backward, the device's after it; the next forward waits for both.

    - The published design updates before the gradients' norm is known and takes an update back
      where clipping would have changed it; here none is.
    - DeepSpeed 0.19 starts no host update before backward has ended where gradients are clipped,
      and then updates and uploads one bucket at a time: that is ``clipping=True``. The passes by
      which it clips are left out.
    - With several devices each owns an equal part of every bucket.
    - Released, it is an optimizer of ZeRO-3 (`SuperOffloadOptimizer_Stage3`), whose hooks are
      around every module. Its gathers are left out.
    """

    def __init__(
        self,
        machine: Machine,
        costs: StepCosts,
        *,
        ratio: float = 0.9,
        clipping: bool = False,
        float32_master: bool = True,
        one_stream: bool = False,
    ) -> None:
        """Share the parameters out.

        Args:
            machine: What it runs on.
            costs: Of one step of the model.
            ratio: Share of the parameters that the host updates.
            clipping: Whether gradients are clipped as the released code does it.
            float32_master: Whether the host has weights, gradients and moments in float32; without
                it in the model's type.
            one_stream: Whether copies both ways share a stream, on which those up stand behind
                all those down.

        Raises:
            ConfigError: The ratio is no share.
        """
        super().__init__(machine, self._hooked(costs))
        if not 0 <= ratio <= 1:
            raise ConfigError(f"ratio must be in [0, 1], got {ratio}: it is the host's share")
        self._clipping, self._one_stream = clipping, one_stream
        self._width = FLOAT_BYTES if float32_master else costs.dtype_bytes
        left = ratio * costs.num_params
        self._on_host = []
        for segment in reversed(costs.segments):
            self._on_host.append(min(left, segment.numel) / self.devices)
            left -= min(left, segment.numel)
        self._on_device = costs.num_params / self.devices - sum(self._on_host)

    def _hooked(self, costs: StepCosts) -> StepCosts:
        """Return the costs with what the framework does around each layer."""
        return zero3_hooks(costs)

    def _step(self, step: int) -> Step:
        machine = self.machine
        seconds = self.update_seconds(self._on_device) * self._width / FLOAT_BYTES
        seconds += self.step_overhead
        passed = self.compute(step)
        copied = self._send(step, passed)
        updates = [] if self._clipping else self._update(step, copied)
        yield self.computed
        since = machine.env.now
        yield from self.wait(passed, "reduce", step)
        if self._clipping:
            updates = self._update(step, copied)
        began = machine.env.now
        on_device = machine.compute("step", seconds, step)
        yield on_device
        since += machine.env.now - began
        yield from self.wait([updated for updated, _ in updates], "host", step)
        last = updates[-1][1] if updates else on_device
        yield from self.wait([self.gather(step, last)], "h2d", step)
        return since

    def _send(self, step: int, passed: list[simpy.Event]) -> list[_Copied]:
        """Queue the copies of the host's part of each gradient, in backward order."""
        machine, copied = self.machine, []
        for elements, event in zip(self._on_host, reversed(passed), strict=True):
            if elements > 0:
                work = machine.down(elements * self._width)
                copied.append((elements, machine.d2h.submit("grads", step, work, [event])))
        return copied

    def _update(self, step: int, copied: list[_Copied]) -> list[tuple[simpy.Event, simpy.Event]]:
        """Queue update and upload of each bucket that was copied; return the events of both."""
        machine = self.machine
        found: list[tuple[simpy.Event, simpy.Event]] = []
        for elements, copy in copied:
            before = [copy]
            if self._clipping and found:
                before.append(found[-1][1])
            work = machine.host_work(elements * _STREAMS * self._width, elements)
            updated = machine.host.submit("adam", step, work, before)
            work = machine.up(elements * self._width)
            before = [updated, copied[-1][1]] if self._one_stream else [updated]
            found.append((updated, machine.h2d.submit("params", step, work, before)))
        return found


class TorchaoOffload(SuperOffload):
    """A model without hooks around its modules: torchao's are of its parameters' gradients."""

    def _hooked(self, costs: StepCosts) -> StepCosts:
        return costs


def _memory(case: SystemCase) -> SystemParts:
    """Return float32 both ways, and the state of the device's own part (Lian et al. 2025).

    Without masters nothing is cast, and all of it has the model's type.
    """
    ratio, width = case.options["ratio"], case.width
    own = (1 - ratio) * case.params / case.total
    cast = width / case.size if case.options["float32_master"] else 0.0
    leaving = case.in_flight * (1 + cast)  # beside its float32 copy
    device = case.device(
        Part("optimizer state", "device", case.state_bytes * own, "of the device's own part"),
        in_flight=leaving,
        after=leaving + case.size * own,
    )
    host = [
        Part("masters" if cast else "weights", "pinned", ratio * width * case.hosted),
        Part("gradients", "pinned", ratio * width * case.hosted),
        Part("moments", "pageable", ratio * 2 * width * case.hosted),
    ]
    return device, host


SUPEROFFLOAD = System(
    name="superoffload", rule="AdamW exactly", schedule=SuperOffload, memory=_memory
)
TORCHAO_OFFLOAD = System(
    name="torchao_offload",
    rule="AdamW exactly",
    schedule=partial(TorchaoOffload, ratio=1.0, float32_master=False, one_stream=True),
    memory=_memory,
)
"""torchao's ``CPUOffloadOptimizer`` with ``offload_gradients`` (torchao/optim/cpu_offload.py).

The host has parameters, gradients and moments in the model's type. It updates a parameter with
PyTorch's fused AdamW when its gradient has arrived, and copies it up behind all copies down.
"""
