"""Schedule: the base of all strategies, and the record of a system that is not the engine."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import simpy

from sim.lanes import SerialLane
from sim.machine import Machine, Process
from sim.memory_parts import ACTIVATION_BUFFERS, SystemCase, SystemParts
from sim.timing.costs import StepCosts
from zenflow.errors import ConfigError

Step = Generator[simpy.Event, Any, float]
"""A process, a step or a wait within one, that results in a time or in seconds."""
Cause = tuple[str, Sequence[simpy.Event]]
"""Name of a stall's cause, and the events that end it."""


class AbstractSchedule(ABC):
    """One strategy at work: a generator that queues each step's jobs on a machine.

    A subclass says in `_step` which lane does what, and what waits for what. The lanes and the
    shared bandwidths decide when each job happens.

    Attributes:
        step_ends: The time at which each step ended: the next forward can begin.
        stalls: Seconds of each step in which the device had nothing to do but wait.
        computed: The end of the last backward queued by `compute`: what is waited for after it is
            a stall.

    Examples:
        Backward follows forward, and then the device waits for its gradients' copies.

        >>> from sim.timing.phases import costs_of_phases
        >>> class CopyAfterBackward(AbstractSchedule):
        ...     def _step(self, step):
        ...         passed = self.compute(step)
        ...         yield simpy.AllOf(self.machine.env, passed)
        ...         since = self.machine.env.now
        ...         yield from self.wait(self.send(passed, step, 2.0), "d2h", step)
        ...         return since
        >>> costs = costs_of_phases(
        ...     forward=1.0, backward=2.0, d2h=1.0, update=3.0, h2d=1.0, num_params=10**9)
        >>> schedule = CopyAfterBackward(Machine(costs.hardware), costs)
        >>> _ = schedule.machine.run(schedule.run(1))
        >>> round(schedule.step_ends[0], 2), round(schedule.stalls[0], 2)
        (4.0, 1.0)
    """

    def __init__(self, machine: Machine, costs: StepCosts) -> None:
        """Start before the first step."""
        self.machine = machine
        self.costs = costs
        self.step_ends: list[float] = []
        self.stalls: list[float] = []
        self.computed = simpy.Event(machine.env)
        self._held_up = 0.0  # seconds of a step in which queued work has waited for copies
        self._last: simpy.Event | None = None  # end of what was queued behind copies before
        # Activations on the host: whether there are any, ends of their copies there, and the
        # last ends of backward, which free a buffer each.
        self._offloads = any(segment.leaving for segment in costs.segments)
        self._left: dict[int, simpy.Event] = {}
        self._passed: list[simpy.Event] = []

    def run(self, num_steps: int) -> Process:
        """Take steps 1 to ``num_steps``."""
        for step in range(1, num_steps + 1):
            yield from self.take(step)

    def take(self, step: int) -> Process:
        """Take one step, behind the one before it."""
        self._held_up = 0.0
        since = yield from self._step(step)
        now = self.machine.env.now
        self.step_ends.append(now)
        self.stalls.append(now - since + self._held_up)

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
        segments = self.costs.segments
        if not self._offloads:
            seconds = [segment.forward for segment in segments]
            return self.machine.compute_all("forward", seconds, step)
        return [self.forward_of(index, step) for index in range(len(segments))][-1]

    def backward(self, step: int) -> simpy.Event:
        """Queue the backward of a micro-batch that is not the step's last; return its end."""
        segments = self.costs.segments
        if not self._offloads:
            seconds = [segment.backward for segment in reversed(segments)]
            return self.machine.compute_all("backward", seconds, step)
        return [self.backward_of(index, step) for index in reversed(range(len(segments)))][-1]

    def forward_of(self, index: int, step: int) -> simpy.Event:
        """Queue one segment's forward, behind which its activations leave; return its end."""
        seconds = self.costs.segments[index].forward
        if not self._offloads:
            return self.machine.compute("forward", seconds, step)
        room = self._room(index)
        done = self.compute_behind("forward", seconds, step, room)
        self._leave_activations(index, step, done)
        return done

    def backward_of(
        self,
        index: int,
        step: int,
        seconds: float | None = None,
        after: Sequence[simpy.Event] = (),
    ) -> simpy.Event:
        """Queue one segment's backward, before which its activations arrive; return its end.

        Args:
            index: Of the segment.
            step: Its step.
            seconds: What it takes; None is `Segment.backward`.
            after: What else must have happened.
        """
        taken = self.costs.segments[index].backward if seconds is None else seconds
        if not self._offloads:
            return self.machine.compute("backward", taken, step, after)
        arrived = self._fetch_activations(index, step)
        done = self.compute_behind("backward", taken, step, arrived, after)
        self._passed = [*self._passed[1 - ACTIVATION_BUFFERS :], done]
        return done

    def _room(self, index: int) -> list[tuple[str, simpy.Event]]:
        """Return the events that a segment's forward waits for: earlier activations have left."""
        if index == 0:
            self._left, self._passed = {}, []
        room = self._left.get(index - ACTIVATION_BUFFERS)
        return [] if room is None else [(self._activations_down()[1], room)]

    def _leave_activations(self, index: int, step: int, done: simpy.Event, count: int = 1) -> None:
        """Queue the copies of a segment's activations to the host, of so many micro-batches."""
        size = count * self.costs.segments[index].leaving
        if size:
            lane, _ = self._activations_down()
            self._left[index] = lane.submit("activations", step, self.machine.down(size), [done])

    def _fetch_activations(
        self, index: int, step: int, count: int = 1
    ) -> list[tuple[str, simpy.Event]]:
        """Queue the copies of activations back, into used buffers; return their end."""
        size = count * self.costs.segments[index].leaving
        if not size:
            return []
        used = self._passed[0] if len(self._passed) == ACTIVATION_BUFFERS else self._last
        before = [event for event in (self._left[index], used) if event is not None]
        lane, cause = self._activations_up()
        return [(cause, lane.submit("activations", step, self.machine.up(size), before))]

    def _activations_down(self) -> tuple[SerialLane, str]:
        """Return the lane of activations to the host, and the cause of waits for it."""
        return self.machine.d2h, "d2h"

    def _activations_up(self) -> tuple[SerialLane, str]:
        """Return the lane of activations to the device, and the cause of waits for it."""
        return self.machine.h2d, "h2d"

    def compute_behind(
        self,
        name: str,
        seconds: float,
        step: int,
        arrived: Sequence[tuple[str, simpy.Event]],
        after: Sequence[simpy.Event] = (),
    ) -> simpy.Event:
        """Queue work on the device that waits for copies; return the event of its end.

        Waiting counts as stall, from the end of the work that was queued here before.

        Args:
            name: Of the span.
            seconds: What the work takes.
            step: Its step.
            arrived: Ends of the copies and of what they wait for, in order, each with the cause
                of a stall by it.
            after: What else must have happened, whose waiting somebody else measures.
        """
        done = self.machine.compute(name, seconds, step, [*(e for _, e in arrived), *after])
        waits = [(cause, event) for cause, event in arrived if event.callbacks is not None]
        if waits:
            before = [event for event in (self._last, *after) if event is not None]
            self.machine.env.process(self._measure(before, waits, step))
        self._last = done
        return done

    def _measure(
        self, before: Iterable[simpy.Event], arrived: Iterable[tuple[str, simpy.Event]], step: int
    ) -> Process:
        """Record stalls by copies, from the end of all work before them."""
        for event in before:
            if not event.processed:
                yield event
        for cause, event in arrived:
            self._held_up += yield from self.wait([event], cause, step)

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
        for index, segment in reversed(list(enumerate(self.costs.segments))):
            self.computed = self.backward_of(index, step)
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
    """A training system other than the engine, by its papers, its code and measurements.

    Examples:
        >>> from sim.simulate import SYSTEMS
        >>> SYSTEMS["megatrain"].options({})
        {'checkpoint_interval': 4}
    """

    name: str
    """Name of the strategy in commands and tables."""
    rule: str
    """Update rule in words; it decides accuracy, of which predictions say nothing."""
    schedule: Callable[..., AbstractSchedule]
    """Maker of its schedule from a machine, a step's costs, and options by keyword."""
    memory: Callable[[SystemCase], SystemParts]
    """Function that returns the system's parts of memory."""

    def options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return every option of the schedule: as given, or its default.

        Raises:
            ConfigError: The schedule has no such option.
        """
        defaults = self._defaults()
        unknown = [name for name in given if name not in defaults]
        if unknown:
            raise ConfigError(
                f"{self.name} does not take {', '.join(unknown)}: its options are "
                f"{', '.join(defaults) or 'none'}"
            )
        return {**defaults, **given}

    def those_of(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return, of several systems' options, the ones that this system has."""
        return {name: value for name, value in options.items() if name in self._defaults()}

    def _defaults(self) -> dict[str, Any]:
        parameters = inspect.signature(self.schedule).parameters.values()
        return {p.name: p.default for p in parameters if p.default is not p.empty}


def refuse_below_1(name: str, value: int) -> None:
    """Refuse a count below 1.

    Raises:
        ConfigError: It is below 1.
    """
    if value < 1:
        raise ConfigError(f"{name} must be at least 1, got {value}: it is a number of them")
