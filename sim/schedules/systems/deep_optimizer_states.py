"""Interleaved updates on host and device: Deep Optimizer States (Maurya et al. 2024).

The optimizer's state lies on the host, in sub-groups. Every `stride`-th one comes up to the
device, is updated there and goes back, while the host updates the others and their weights go up.
"""

from __future__ import annotations

from collections.abc import Iterator

import simpy

from sim.machine import Machine
from sim.memory_parts import STATE_BYTES, Part, SystemCase, SystemParts
from sim.schedules.schedule import AbstractSchedule, Step, System, refuse_below_1
from sim.timing.costs import StepCosts, costs_of

_DEVICE_BUFFERS = 2
"""Number of sub-groups' states on the device at once: one moves while another is updated."""


class DeepOptimizerStates(AbstractSchedule):
    """ZeRO-Offload with every stride-th sub-group updated on the device.

    The device's next state is asked for before the weights of the sub-groups in between.
    Gradients that the device uses stay there: each layer's copy to the host is smaller by their
    share. States on their way back when the weights are complete run on behind the next forward.
    With several devices each has its own sub-groups.

    Attributes:
        stride: In force: given, or chosen.
    """

    def __init__(
        self,
        machine: Machine,
        costs: StepCosts,
        *,
        subgroup: int = 100_000_000,
        stride: int | None = None,
    ) -> None:
        """Cut each device's state into sub-groups and settle the stride.

        Args:
            machine: What it runs on.
            costs: Of one step of the model.
            subgroup: Elements of a sub-group.
            stride: Every how manyth sub-group is the device's: 1 for all, more than there are for
                none; None chooses by what each part of the machine would take.

        Raises:
            ConfigError: An option is below 1.
        """
        super().__init__(machine, costs)
        if stride is not None:
            refuse_below_1("stride", stride)
        self._sizes = self.pieces("subgroup", subgroup)
        self._host_bytes = 2 * STATE_BYTES + 2 * costs.dtype_bytes
        # Of strides that take equally long the widest asks for the least room on the device.
        self.stride = stride or min(range(len(self._sizes) + 1, 0, -1), key=self._step_seconds)
        self._host_share = 1 - sum(self._sizes[self.stride - 1 :: self.stride]) / (
            costs.num_params / self.devices
        )
        self._returned: list[simpy.Event] = []

    def _step_seconds(self, stride: int) -> float:
        """Return the least seconds of a step: each part of the machine has its work to do."""
        rates, size = self.machine.rates, self.costs.dtype_bytes
        states = [elements * STATE_BYTES for elements in self._sizes[stride - 1 :: stride]]
        up, on_device = sum(states), sum(states) / STATE_BYTES
        down = sum(states[:-_DEVICE_BUFFERS])  # the last ones go behind the next forward
        on_host = sum(self._sizes) - on_device
        host, weights = on_host * self._host_bytes, on_host * size
        update = max(
            host / rates.host,
            (up + weights) / rates.h2d,
            down / rates.d2h,
            (up + down + weights) / rates.duplex,
            (rates.host_sharing * host + rates.sharing * (up + down + weights)) / rates.dram,
            self.update_seconds(on_device),
        )
        return max(self.costs.compute_seconds + update, (up + on_host * size) / rates.d2h)

    def _step(self, step: int) -> Step:
        machine = self.machine
        passed, share = self.compute(step), self._host_share
        copied = self.send(passed, step, share * self.costs.dtype_bytes) if share > 0 else []
        yield machine.compute("step", self.step_overhead, step)
        since = machine.env.now
        yield from self.wait([*copied, *self._returned], "d2h", step)
        self._returned = []
        updated: list[simpy.Event] = []
        uploaded: list[simpy.Event] = []
        on_device = list(self._update(step, updated, uploaded))
        for arrived, done in on_device:
            yield from self.wait([arrived], "h2d", step)
            began = machine.env.now
            yield done
            since += machine.env.now - began  # it works meanwhile
        yield from self.wait(updated, "host", step)
        last = [*(done for _, done in on_device), *uploaded][-1]
        yield from self.wait([*uploaded, self.gather(step, last)], "h2d", step)
        return since

    def _update(
        self, step: int, updated: list[simpy.Event], uploaded: list[simpy.Event]
    ) -> Iterator[tuple[simpy.Event, simpy.Event]]:
        """Queue all sub-groups: the host's into the lists, the device's as (arrived, updated)."""
        machine, sizes = self.machine, self._sizes
        for first in range(0, len(sizes), self.stride):
            group = sizes[first : first + self.stride]
            is_full = len(group) == self.stride
            if is_full:
                state = machine.up(group[-1] * STATE_BYTES)
                is_free = len(self._returned) < _DEVICE_BUFFERS
                after = [] if is_free else [self._returned[-_DEVICE_BUFFERS]]
                arrived = machine.h2d.submit("state", step, state, after)
            for elements in group[: len(group) - is_full]:
                work = machine.host_work(elements * self._host_bytes)
                updated.append(machine.host.submit("adam", step, work))
                work = machine.up(elements * self.costs.dtype_bytes)
                uploaded.append(machine.h2d.submit("params", step, work, updated[-1:]))
            if is_full:
                seconds = machine.device_work(self.update_seconds(group[-1]))
                done = machine.device.submit("step", step, seconds, [arrived])
                state = machine.down(group[-1] * STATE_BYTES)
                self._returned.append(machine.d2h.submit("state", step, state, [done]))
                yield arrived, done


def _memory(case: SystemCase) -> SystemParts:
    """Return two sub-groups' states on the device, and the gradients that it updates by."""
    machine = Machine(case.hardware, keeps_spans=False)
    costs = costs_of(case.workload, case.hardware)
    stride = DeepOptimizerStates(machine, costs, **case.options).stride
    share = case.params / case.total
    subgroup = min(share, float(case.options["subgroup"]))
    on_device = share // (subgroup * stride) * subgroup
    buffers = min(_DEVICE_BUFFERS * subgroup, on_device)
    states = Part("sub-groups' states", "device", STATE_BYTES * buffers, f"stride {stride}")
    return case.device(states, after=case.in_flight + case.size * on_device), case.offloaded()


DEEP_OPTIMIZER_STATES = System(
    name="deep_optimizer_states",
    rule="AdamW exactly",
    schedule=DeepOptimizerStates,
    memory=_memory,
)
