"""What all schedules share, and the record of a system that is not the engine."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import simpy

from sim.machine import Machine, Process
from sim.memory.parts import SystemCase, SystemParts
from sim.timing.costs import StepCosts
from zenflow.errors import ConfigError

Step = Generator[simpy.Event, Any, float]
"""A process, a step or a wait within one, that results in a time or in seconds."""
Cause = tuple[str, Sequence[simpy.Event]]
"""Name of what is waited for, and the events of its end."""


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

    def run(self, num_steps: int) -> Process:
        """Take steps 1 to ``num_steps``."""
        for step in range(1, num_steps + 1):
            since = yield from self._step(step)
            now = self.machine.env.now
            self.step_ends.append(now)
            self.stalls.append(now - since)

    @abstractmethod
    def _step(self, step: int) -> Step:
        """Take one step, and return the time since which the device has only waited."""

    @property
    def devices(self) -> int:
        """Devices that train together, with equal parts of the optimizer's state."""
        return self.machine.hardware.total_devices

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
        seconds = [segment.forward for segment in self.costs.segments]
        return self.machine.compute_all("forward", seconds, step)

    def backward(self, step: int) -> simpy.Event:
        """Queue the backward of a micro-batch that is not the step's last; return its end."""
        seconds = [segment.backward for segment in reversed(self.costs.segments)]
        return self.machine.compute_all("backward", seconds, step)

    def compute(self, step: int, *, passes: float = 1.0) -> list[simpy.Event]:
        """Queue forward and backward of a step.

        Args:
            step: Its number.
            passes: Of each gradient over the fabric: 1 for a reduce-scatter, 2 for an all-reduce.

        Returns:
            For each segment, in the order of forward, the event of its last backward's end, with
            its gradient reduced over the devices.
        """
        for _ in range(self.costs.accumulation - 1):
            self.forward(step)
            self.backward(step)
        self.forward(step)
        passed: list[simpy.Event] = []
        for segment in reversed(self.costs.segments):
            self.computed = self.machine.compute("backward", segment.backward, step)
            size = passes * segment.numel * self.costs.dtype_bytes
            passed.append(self.machine.collective("reduce", size, step, self.computed))
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

    def wait(self, events: Iterable[simpy.Event], cause: str, step: int) -> Step:
        """Let the device wait, which is stall of this cause; the result is the seconds of it."""
        since = self.machine.env.now
        for event in events:
            if not event.processed:
                yield event
        self.machine.stall(cause, since, step)
        return self.machine.env.now - since


class Waits:
    """Stalls between works that are queued ahead, so that no process waits them out.

    Attributes:
        seconds: Of all of them since last reset.
    """

    def __init__(self, machine: Machine) -> None:
        """Start with none."""
        self._machine = machine
        self.seconds = 0.0

    def watch(self, passed: simpy.Event, causes: Sequence[Cause], step: int) -> None:
        """Let the time be recorded that the device, once past an event, waits for others.

        Args:
            passed: The end of the work before.
            causes: What the next work waits for, by cause; time counts for the first that is not
                over.
            step: Their step.
        """
        left = [
            cause for cause in causes if any(event.callbacks is not None for event in cause[1])
        ]
        if left:
            self._machine.env.process(self._measure(passed, left, step))

    def _measure(self, passed: simpy.Event, causes: Sequence[Cause], step: int) -> Process:
        if not passed.processed:
            yield passed
        for cause, events in causes:
            since = self._machine.env.now
            for event in events:
                if not event.processed:
                    yield event
            self._machine.stall(cause, since, step)
            self.seconds += self._machine.env.now - since


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """Another system, by its papers, its code and measurements of it."""

    name: str
    """Name of the strategy."""
    rule: str
    """Update rule in words; it decides accuracy, of which predictions say nothing."""
    schedule: Callable[..., AbstractSchedule]
    """Maker of its schedule from a machine, a step's costs, and options by keyword."""
    memory: Callable[[SystemCase], SystemParts]
    """Function that returns its parts of memory."""

    def options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return every option of the schedule: as given, or its default.

        Raises:
            ConfigError: The schedule has no such option.
        """
        parameters = inspect.signature(self.schedule).parameters.values()
        defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        unknown = [name for name in given if name not in defaults]
        if unknown:
            raise ConfigError(
                f"{self.name} does not take {', '.join(unknown)}: its options are "
                f"{', '.join(defaults) or 'none'}"
            )
        return {**defaults, **given}


def refuse_below_1(name: str, value: int) -> None:
    """Refuse an option that must be a number of something.

    Raises:
        ConfigError: It is below 1.
    """
    if value < 1:
        raise ConfigError(f"{name} must be at least 1, got {value}: it is a number of them")
