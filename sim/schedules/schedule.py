"""What all schedules share: a machine, a model's costs, and when each step ended."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable

import simpy

from sim.machine import Machine, Process
from sim.timing.costs import StepCosts
from zenflow.errors import ConfigError


class AbstractSchedule(ABC):
    """One strategy at work.

    Attributes:
        step_ends: The time at which each step ended: the next forward can begin.
        stalls: Seconds of each step in which the device had nothing to do but wait.
        computed: The end of the last backward queued by `compute`: what is waited for after it is
            a stall.
    """

    def __init__(self, machine: Machine, costs: StepCosts) -> None:
        """Start before the first step."""
        self.machine = machine
        self.costs = costs
        self.step_ends: list[float] = []
        self.stalls: list[float] = []
        self.computed = simpy.Event(machine.env)

    @abstractmethod
    def run(self, num_steps: int) -> Process:
        """Take steps 1 to ``num_steps``."""

    @property
    def devices(self) -> int:
        """Devices that train together, with equal parts of the optimizer's state."""
        return self.machine.hardware.num_devices

    @property
    def step_overhead(self) -> float:
        """Seconds of an optimizer step on the device beside what its elements take."""
        return self.machine.hardware.overheads.step.value

    def update_seconds(self, elements: float) -> float:
        """Return the seconds in which AdamW on the device updates so many elements."""
        return elements / self.machine.hardware.overheads.device_update.value

    def pieces(self, name: str, size: int) -> list[float]:
        """Return the elements of each piece when a device's share is cut into pieces of a size.

        Args:
            name: Option that sets the size, for errors.
            size: Elements of a piece; the last one may be smaller.

        Raises:
            ConfigError: The size is below 1.
        """
        refuse_below_1(name, size)
        share = self.costs.num_params / self.devices
        count = max(1, math.ceil(share / size))
        return [min(size, share - index * size) for index in range(count)]

    def forward(self, step: int) -> simpy.Event:
        """Queue the forward of one micro-batch; return the event of its end."""
        ends = [
            self.machine.compute("forward", segment.forward, step)
            for segment in self.costs.segments
        ]
        return ends[-1]

    def compute(self, step: int, *, passes: float = 1.0) -> list[simpy.Event]:
        """Queue forward and backward of a step.

        Args:
            step: Its number.
            passes: Of each gradient over the fabric: 1 for a reduce-scatter, 2 for an all-reduce.

        Returns:
            For each segment, in the order of forward, the event of its last backward's end, with
            its gradient reduced over the devices.
        """
        passed: list[simpy.Event] = []
        for micro in range(self.costs.accumulation):
            self.forward(step)
            is_last = micro == self.costs.accumulation - 1
            for segment in reversed(self.costs.segments):
                event = self.machine.compute("backward", segment.backward, step)
                if is_last:
                    size = passes * segment.numel * self.costs.dtype_bytes
                    passed.append(self.machine.collective("reduce", size, step, event))
                    self.computed = event
        return passed[::-1]

    def send(self, passed: list[simpy.Event], step: int, bytes_each: float) -> list[simpy.Event]:
        """Queue the copies of each device's share of gradients, in the order of backward.

        Args:
            passed: The end of each segment's backward, in the order of forward.
            step: Their step.
            bytes_each: Bytes of an element on the link.
        """
        copied = []
        for segment, event in zip(reversed(self.costs.segments), reversed(passed), strict=True):
            work = self.machine.down(segment.numel / self.devices * bytes_each)
            copied.append(self.machine.d2h.submit("grads", step, work, [event]))
        return copied

    def gather(self, step: int, after: simpy.Event) -> simpy.Event:
        """Queue the all-gather of the weights that each device has updated a part of."""
        size = self.costs.num_params * self.costs.dtype_bytes
        return self.machine.collective("all-gather", size, step, after)

    def wait(self, events: Iterable[simpy.Event], cause: str, step: int) -> Process:
        """Let the device wait; what it waits for is stall of this cause."""
        since = self.machine.env.now
        for event in events:
            if not event.processed:
                yield event
        self.machine.stall(cause, since, step)

    def end_step(self, since: float) -> None:
        """Note that a step has ended, in which the device has only waited since then."""
        now = self.machine.env.now
        self.step_ends.append(now)
        self.stalls.append(now - since)


def refuse_below_1(name: str, value: int) -> None:
    """Refuse an option that must be a number of something.

    Raises:
        ConfigError: It is below 1.
    """
    if value < 1:
        raise ConfigError(f"{name} must be at least 1, got {value}: it is a number of them")
