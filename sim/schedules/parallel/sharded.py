"""Forward and backward with sharded weights, as FSDP2 and ZeRO-3 run them.

Each device holds an equal part of every layer. A layer's weights are gathered before it is used
and dropped behind it, and its gradients are reduced and scattered behind its backward (Rajbhandari
et al. 2020, section 5.3; Zhao et al. 2023).

- All collectives share one communicator, so that they happen one after another, in the order in
  which they are launched: the next layer's all-gather before this layer's reduce-scatter.
- All-gathers run ahead by `prefetch` layers, in forward and in backward. A pass begins with its
  first layer's, which nothing hides.
- The last layer stays gathered from forward to backward, which needs it at once.
- A CPU that plays the device waits for each: FSDP2 overlaps by CUDA's streams alone.
- Every micro-batch gathers again. It reduces again unless gradients are synchronised once a step.
- Activations that wait on the host go behind a layer's forward and come back before its backward,
  through as many buffers as without sharding. Their copies share each device's link with offload's
  and, where that is the fabric, with collectives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import simpy

from sim.machine import Machine
from sim.memory_parts import ACTIVATION_BUFFERS
from sim.schedules.schedule import Cause, Waits
from sim.timing.costs import StepCosts, layers_of

Backward = tuple[simpy.Event, simpy.Event]
"""Ends of a layer's backward and of its reduce-scatter."""
Behind = Callable[[float, simpy.Event], list[simpy.Event]]
"""Function of a reduce-scatter's elements and its end, with what the device waits for next."""


class ShardedPasses:
    """Queues passes of one device, with the collectives that they need.

    Attributes:
        units: Indices of the segments of each layer, in the order of forward.
        fetch_bytes: Bytes of an element that come up from the host before a layer is gathered.
    """

    def __init__(
        self,
        machine: Machine,
        costs: StepCosts,
        waits: Waits,
        *,
        reshards: bool = True,
        prefetch: int = 1,
        reduce_bytes: int | None = None,
        fetch_bytes: float = 0,
        gathered_together: float = math.inf,
    ) -> None:
        """Find the layers.

        Args:
            machine: What it runs on.
            costs: Of one step of the model.
            waits: Where stalls are noted.
            reshards: Whether layers are dropped behind their forward, to be gathered again.
            prefetch: Number of layers whose all-gathers run ahead.
            reduce_bytes: Bytes of an element in a reduce-scatter; None is the model's own.
            fetch_bytes: Bytes of an element of each device's part where that lies on the host, and
                is copied up first; 0 where it lies on the device.
            gathered_together: Largest number of elements of one all-gather.
        """
        self._machine, self._costs, self._waits = machine, costs, waits
        self._reshards, self._prefetch, self.fetch_bytes = reshards, prefetch, fetch_bytes
        self._together = gathered_together
        self._reduce_bytes = reduce_bytes or costs.dtype_bytes
        self._blocks = machine.hardware.device.is_cpu
        self.units = layers_of(costs)
        self._sizes = [sum(costs.segments[index].numel for index in unit) for unit in self.units]
        self._leaving = [sum(costs.segments[i].leaving for i in unit) for unit in self.units]
        self._left: dict[int, simpy.Event] = {}  # ends of activations' copies to the host
        started = simpy.Event(machine.env)
        started.succeed()
        # Ends of the layers' works since this pair of passes began, the work before first.
        self._ends: list[simpy.Event] = [started]
        self._gathered: list[simpy.Event | None] = []
        self._queued = 0

    @property
    def _visits(self) -> list[int]:
        """Layers in the order of a forward and a backward."""
        count = len(self.units)
        return [*range(count), *reversed(range(count))]

    def _gathers(self, visit: int) -> bool:
        """Whether a layer is gathered for the visit of this number in a forward and backward."""
        count = len(self.units)
        return visit < count or (self._reshards and visit > count)

    def _gather(self, upto: int, step: int) -> None:
        """Queue the all-gathers of all visits up to this one that are not queued yet."""
        machine = self._machine
        for visit in range(self._queued, min(upto + 1, 2 * len(self.units))):
            self._queued = visit + 1
            if not self._gathers(visit):
                self._gathered.append(None)
                continue
            numel = self._sizes[self._visits[visit]]
            size = numel * self._costs.dtype_bytes
            # Its memory is that of the layer before those that run ahead.
            after = self._ends[max(0, visit - self._prefetch)]
            if self.fetch_bytes:
                part = numel * self.fetch_bytes / machine.hardware.total_devices
                after = machine.h2d.submit("params", step, machine.up(part), [after])
            calls = max(1, math.ceil(numel / self._together))
            gathered = machine.collective(
                "all-gather", size, step, after, blocks=True, calls=calls
            )
            self._gathered.append(gathered)

    def begin(self, after: simpy.Event | None = None) -> None:
        """Start a pair of passes behind an event; None is behind the last work."""
        self._ends = [after or self._ends[-1]]
        self._gathered = []
        self._queued = 0
        self._left = {}

    def forward(self, step: int) -> simpy.Event:
        """Queue the forward of one micro-batch; return the event of its end."""
        for visit, unit in enumerate(self.units):
            works = [self._costs.segments[index].forward for index in unit]
            room = self._left.get(visit - ACTIVATION_BUFFERS)
            end = self._visit(visit, "forward", works, step, [("d2h", [room])] if room else [])
            if self._leaving[visit]:
                work = self._machine.down(self._leaving[visit])
                self._left[visit] = self._machine.d2h.submit("activations", step, work, [end])
        return self._ends[-1]

    def backward(
        self,
        unit: int,
        seconds: Sequence[float],
        step: int,
        room: Sequence[simpy.Event] = (),
        *,
        elements: float | None = None,
    ) -> Backward:
        """Queue a layer's backward and a reduce-scatter; layers go from the last to the first.

        Args:
            unit: Number of the layer.
            seconds: Of each of its segments, in the order of backward.
            step: Its step.
            room: What else must have happened: room for gradients on their way to the host.
            elements: Number of gradients that are reduced behind it; None is the layer's own. With
                0 both ends are the same.
        """
        visit = 2 * len(self.units) - 1 - unit
        arrived = self._fetch_activations(unit, visit, step)
        passed = self._visit(visit, "backward", seconds, step, [("h2d", arrived), ("d2h", room)])
        elements = self._sizes[unit] if elements is None else elements
        if not elements:
            return passed, passed
        size = elements * self._reduce_bytes
        if self._blocks:
            size *= 2  # gloo reduces everything everywhere, and keeps a part
        reduced = self._machine.collective("reduce", size, step, passed, blocks=True)
        return (reduced if self._blocks else passed), reduced

    def backward_all(
        self, step: int, behind: Behind | None = None, *, reduces: bool = True, bucket: float = 0.0
    ) -> Backward:
        """Queue a micro-batch's backward, layer by layer; return the ends of the first layer's.

        Args:
            step: Its step.
            behind: Function that is given the number of elements of each reduce-scatter and its
                end. It returns what the next layer's backward waits for.
            reduces: Whether gradients are reduced.
            bucket: Least number of elements that are reduced together; 0 is each layer by itself.
        """
        segments = self._costs.segments
        filled, room = 0.0, list[simpy.Event]()
        for unit in reversed(range(len(self.units))):
            seconds = [segments[index].backward for index in reversed(self.units[unit])]
            filled += self._sizes[unit]
            reduced = filled if reduces and (filled >= bucket or not unit) else 0.0
            ends = self.backward(unit, seconds, step, room, elements=reduced)
            room = behind(reduced, ends[1]) if reduced and behind is not None else []
            filled -= reduced
        return ends

    def _fetch_activations(self, unit: int, visit: int, step: int) -> list[simpy.Event]:
        """Queue the copy of a layer's activations back, into a buffer that has been used."""
        if not self._leaving[unit]:
            return []
        used = self._ends[max(len(self.units), visit + 1 - ACTIVATION_BUFFERS)]
        work = self._machine.up(self._leaving[unit])
        before = [self._left[unit], used]
        return [self._machine.h2d.submit("activations", step, work, before)]

    def _visit(
        self, visit: int, name: str, seconds: Sequence[float], step: int, copies: Sequence[Cause]
    ) -> simpy.Event:
        """Queue a layer's works behind its all-gather, and the all-gathers that run ahead.

        Args:
            visit: Its number in a forward and backward.
            name: Of the works' spans.
            seconds: Of each work.
            step: Its step.
            copies: What else must have happened, by the stall's cause.
        """
        self._gather(visit, step)
        before, gathered = self._ends[-1], self._gathered[visit]
        awaited: list[Cause] = [] if gathered is None else [("gather", [gathered])]
        awaited += copies
        after = [event for _, events in awaited for event in events]
        self._waits.watch(before, copies if self._blocks else awaited, step)
        for each in seconds:
            end = self._machine.compute(name, each, step, after)
            after = []
        self._ends.append(end)
        self._gather(visit + self._prefetch, step)
        return end
