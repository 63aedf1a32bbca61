"""Fluid resources: flows of bytes that share links and memory max-min fairly, on SimPy's clock.

A copy to the host and an optimizer's loop both use the host's memory. While both run, each gets a
part of its bandwidth; when one ends, the other speeds up. This module says who gets how much, and
when each ends.

- A kind of flow names every resource that it uses, with what one byte of its own costs there: a
  copy over PCIe also loads the host's DRAM.
- It may have a rate of its own that it can't exceed: CPU Adam loads DRAM alone, and no faster than
  its threads can.
- While nothing begins or ends, every flow moves at a constant rate: the weighted max-min fair one,
  found by progressive filling (Bertsekas and Gallager, Data Networks, section 6.5.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import simpy

from zenflow.errors import ConfigError

_ENDED = 1e-9
"""Share of a flow's bytes that rounding may leave: what is below it has arrived."""


@dataclass(frozen=True, slots=True, eq=False)
class Resource:
    """A bandwidth that flows share: a link's one direction, both, or DRAM. See `fair_rates`."""

    name: str
    capacity: float
    """Bandwidth of all flows together, bytes/s."""

    def __post_init__(self) -> None:
        """Refuse a capacity with which nothing would end."""
        if not (math.isfinite(self.capacity) and self.capacity > 0):
            raise ConfigError(
                f"the capacity of {self.name} must be a positive number of bytes/s, got "
                f"{self.capacity}: leave out what the machine does not have"
            )


@dataclass(frozen=True, slots=True, eq=False)
class FlowKind:
    """Costs and limits that all flows of one kind have in common.

    Raises:
        ConfigError: Nothing bounds the rate.

    See `fair_rates`.
    """

    name: str
    uses: Mapping[Resource, float]
    """Bytes that each resource moves for one byte of the flow."""
    max_rate: float = math.inf
    """Bytes/s that a flow can't exceed whatever is free; infinite for no such limit."""
    weight: float = 1.0
    """Rates grow in proportion to it where flows compete: 1 for equal bytes/s."""

    def __post_init__(self) -> None:
        """Drop unused resources; refuse a flow that nothing bounds."""
        uses = {resource: share for resource, share in self.uses.items() if share > 0}
        object.__setattr__(self, "uses", uses)
        if not (self.max_rate > 0 and self.weight > 0) or (not uses and math.isinf(self.max_rate)):
            raise ConfigError(
                f"the flow {self.name} needs a resource or a positive rate that bounds it, got "
                f"rate {self.max_rate} and {len(uses)} resources: name what it moves over"
            )


@dataclass(slots=True, eq=False)
class Flow:
    """Bytes on their way."""

    kind: FlowKind
    num_bytes: float
    """Size of the flow, bytes."""
    on_end: Callable[[], object]
    """Function to call when the last byte has arrived."""
    remaining: float
    """Bytes that have not moved yet."""
    rate: float = 0.0
    """Present rate in bytes/s."""


class Alarm(simpy.Event):
    """An event that can be set again and again, for waits of which there is one at a time.

    A new event for each wait would take longer.
    """

    _ok = True
    _value = None

    def __init__(self, env: simpy.Environment, callback: Callable[[Any], None]) -> None:
        """Start unset; ``callback`` is called whenever the alarm goes off."""
        self.env = env
        self.callbacks = self._calls = [callback]

    def set(self, delay: float) -> None:
        """Go off after so many seconds; an alarm that is set must not be set again before."""
        self.callbacks = self._calls  # SimPy has taken them off
        self.env.schedule(self, delay=delay)


@dataclass(slots=True)
class FluidNetwork:
    """All flows of a machine. Rates change only where a flow begins or ends.

    Attributes:
        env: SimPy's environment, whose time is in seconds.
        flows: Those under way, in the order in which they began.
        moved: Bytes of each kind of flow that have ended or been stopped.

    Examples:
        Two copies share a link of 10 bytes/s. The short one gets half, the long one the rest.

        >>> env = simpy.Environment()
        >>> network, link = FluidNetwork(env), Resource("link", 10.0)
        >>> for size in (10, 40):
        ...     _ = network.send(FlowKind("copy", {link: 1.0}), size, lambda: print(env.now))
        >>> env.run()
        2.0
        5.0
    """

    env: simpy.Environment
    flows: list[Flow] = field(default_factory=list)
    moved: dict[FlowKind, float] = field(default_factory=dict)
    _since: float = 0.0
    _wake: simpy.Event | None = None
    """Alarm of the next end. Alarms from before rates changed still go off, and do nothing."""
    _ending: Flow | None = None
    """Flow that will finish first, at the alarm's time."""
    _is_ending: bool = False
    """Whether flows are being ended: one that begins meanwhile gets its rate when all are."""
    _known: dict[tuple[FlowKind, ...], list[float]] = field(default_factory=dict)
    """Fair rates by the kinds of the flows under way: few mixes ever occur."""
    _spare: list[Alarm] = field(default_factory=list)
    """Alarms that have happened, to be set again."""

    def send(self, kind: FlowKind, num_bytes: float, on_end: Callable[[], object]) -> Flow:
        """Begin a flow.

        Args:
            kind: What it uses.
            num_bytes: Its size; nothing to move ends at once.
            on_end: Called at its end, and may begin other flows.

        Raises:
            ConfigError: The size is negative or not finite.
        """
        if not 0 <= num_bytes < math.inf:
            raise ConfigError(f"a flow's bytes must be a finite number >= 0, got {num_bytes}")
        flow = Flow(kind, num_bytes, on_end, num_bytes)
        if num_bytes == 0:
            on_end()
        elif self._is_ending:
            self.flows.append(flow)
        else:
            self._move()
            self.flows.append(flow)
            self._share_out()
        return flow

    def stop(self, flow: Flow) -> float:
        """Take a flow off before its end; return the bytes that it had left, 0 if it has ended."""
        if flow.remaining == 0:
            return 0.0
        self._move()
        self.flows.remove(flow)
        self._count(flow)
        if not self._is_ending:
            self._share_out()
        return flow.remaining

    def carried(self, resource: Resource) -> float:
        """Return the bytes that a resource has moved so far."""
        self._move()
        moved = [*self.moved.items(), *((f.kind, f.num_bytes - f.remaining) for f in self.flows)]
        return sum(kind.uses.get(resource, 0.0) * num_bytes for kind, num_bytes in moved)

    def _count(self, flow: Flow) -> None:
        kind = flow.kind
        self.moved[kind] = self.moved.get(kind, 0.0) + flow.num_bytes - flow.remaining

    def _move(self) -> None:
        """Take all flows to the present at the rates they had."""
        now = self.env.now
        elapsed = now - self._since
        self._since = now
        if elapsed <= 0:
            return
        for flow in self.flows:
            left = flow.remaining - flow.rate * elapsed
            flow.remaining = left if left > 0.0 else 0.0

    def _share_out(self) -> None:
        """Give every flow its fair rate, and wake up when the next one ends."""
        flows = self.flows
        if not flows:
            self._wake = None
            return
        kinds = tuple([flow.kind for flow in flows])
        rates = self._known.get(kinds)
        if rates is None:
            rates = self._known[kinds] = fair_rates(kinds)
        ending, soonest = flows[0], math.inf
        for flow, rate in zip(flows, rates):  # noqa: B905 - as long as each other, and often run
            flow.rate = rate
            left = flow.remaining / rate
            if left < soonest:
                ending, soonest = flow, left
        self._ending = ending
        spare = self._spare
        self._wake = wake = spare.pop() if spare else Alarm(self.env, self._wake_up)
        wake.set(soonest)

    def _wake_up(self, event: Alarm) -> None:
        self._spare.append(event)
        if event is not self._wake:
            return  # rates have changed since
        self._move()
        # The one that this was about has ended, whatever rounding says: else an end that is
        # nearer than the clock can tell would be waited for again and again.
        still: list[Flow] = []
        ended: list[Flow] = []
        ending = self._ending
        for flow in self.flows:
            over = flow is ending or flow.remaining <= _ENDED * flow.num_bytes
            (ended if over else still).append(flow)
        self.flows = still
        self._is_ending = True
        for flow in ended:
            flow.remaining = 0.0
            self._count(flow)
            flow.on_end()
        self._is_ending = False
        self._share_out()


def fair_rates(kinds: Sequence[FlowKind]) -> list[float]:
    """Return the weighted max-min fair rate, bytes/s, of one flow of each of these kinds.

    All rates grow together, in proportion to their weights; a flow stops where its own limit is
    reached or one of its resources is full. No rate can then be raised without lowering one that
    is, for its weight, no larger.

    Examples:
        >>> link, memory = Resource("link", 10.0), Resource("memory", 100.0)
        >>> copy = FlowKind("copy", {link: 1.0, memory: 1.0})
        >>> fair_rates([copy, copy, FlowKind("adam", {memory: 1.0})])
        [5.0, 5.0, 90.0]
    """
    rates = [0.0] * len(kinds)
    free = {resource: resource.capacity for kind in kinds for resource in kind.uses}
    growing = list(range(len(kinds)))
    while growing:
        load = dict.fromkeys(free, 0.0)
        for index in growing:
            for resource, share in kinds[index].uses.items():
                load[resource] += share * kinds[index].weight
        full = {r: max(0.0, free[r]) / share for r, share in load.items() if share > 0}
        limits = [kinds[index].max_rate / kinds[index].weight for index in growing]
        level = min([*full.values(), *limits])
        left = []
        for index in growing:
            kind = kinds[index]
            stops = kind.max_rate / kind.weight <= level or any(
                full[resource] <= level for resource in kind.uses
            )
            if not stops:
                left.append(index)
                continue
            rates[index] = level * kind.weight
            for resource, share in kind.uses.items():
                free[resource] -= rates[index] * share
        growing = left
    return rates
