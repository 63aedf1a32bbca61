"""Fluid resources: flows of bytes that share links and memory max-min fairly, on SimPy's clock.

A copy over PCIe also loads the host's DRAM; CPU Adam loads DRAM alone, and no faster than its
threads can. So a flow names every resource that it uses, with the bytes that it costs there for
each byte of its own, and may have a rate of its own that it can't exceed. While nothing begins or
ends, every flow moves at a constant rate: the weighted max-min fair one, found by progressive
filling (Bertsekas and Gallager, Data Networks, section 6.5.2). No torch.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import simpy

from zenflow.errors import ConfigError

_ENDED = 1e-9
"""Share of a flow's bytes that rounding may leave: what is below it has arrived."""


@dataclass(slots=True, eq=False)
class Resource:
    """Something that moves bytes: one direction of a link, both together, a host's DRAM."""

    name: str
    capacity: float
    """Bytes/s for all flows together."""
    carried: float = 0.0
    """Bytes moved so far."""
    busy_seconds: float = 0.0
    """Time in which it moved any."""

    def __post_init__(self) -> None:
        """Refuse a capacity with which nothing would end."""
        if not (math.isfinite(self.capacity) and self.capacity > 0):
            raise ConfigError(
                f"the capacity of {self.name} must be a positive number of bytes/s, got "
                f"{self.capacity}: leave out what the machine does not have"
            )


@dataclass(slots=True, eq=False)
class Flow:
    """Bytes on their way."""

    num_bytes: float
    uses: Mapping[Resource, float]
    """Bytes that each resource moves for one byte of the flow."""
    max_rate: float
    """Bytes/s that the flow can't exceed whatever is free; infinite for no such limit."""
    done: simpy.Event
    remaining: float
    rate: float = 0.0


@dataclass(slots=True)
class FluidNetwork:
    """All flows of a machine. Rates change only where a flow begins or ends.

    Attributes:
        env: SimPy's environment, whose time is in seconds.
        flows: Those under way, in the order in which they began.
    """

    env: simpy.Environment
    flows: list[Flow] = field(default_factory=list)
    _since: float = 0.0
    _plan: int = 0

    def send(
        self, num_bytes: float, uses: Mapping[Resource, float], max_rate: float = math.inf
    ) -> simpy.Event:
        """Begin a flow and return the event of its end.

        Args:
            num_bytes: Its size; nothing to move ends at once.
            uses: For each resource the bytes that one byte of the flow costs there.
            max_rate: Bytes/s that it can't exceed.

        Raises:
            ConfigError: The size is negative or not finite, or nothing bounds the rate.
        """
        if not (math.isfinite(num_bytes) and num_bytes >= 0):
            raise ConfigError(f"a flow's bytes must be a finite number >= 0, got {num_bytes}")
        uses = {resource: share for resource, share in uses.items() if share > 0}
        if not max_rate > 0 or (not uses and math.isinf(max_rate)):
            raise ConfigError(
                f"a flow needs a resource or a rate that bounds it, got rate {max_rate} and no "
                "resource: name what it moves over"
            )
        done = self.env.event()
        if num_bytes == 0:
            return done.succeed()
        self._move()
        self.flows.append(Flow(num_bytes, uses, max_rate, done, remaining=num_bytes))
        self._share_out()
        return done

    def _move(self) -> None:
        """Take all flows to the present at the rates they had."""
        elapsed, self._since = self.env.now - self._since, self.env.now
        if elapsed <= 0:
            return
        busy = set()
        for flow in self.flows:
            moved = min(flow.remaining, flow.rate * elapsed)
            flow.remaining -= moved
            for resource, share in flow.uses.items():
                resource.carried += moved * share
                busy.add(resource)
        for resource in busy:
            resource.busy_seconds += elapsed

    def _share_out(self) -> None:
        """Give every flow its fair rate, and wake up when the next one ends."""
        for flow, rate in zip(self.flows, fair_rates(self.flows), strict=True):
            flow.rate = rate
        self._plan += 1
        if self.flows:
            self.env.process(self._wake_up(self._plan))

    def _wake_up(self, plan: int) -> Generator[simpy.Event, Any, None]:
        ending = min(self.flows, key=lambda flow: flow.remaining / flow.rate)
        yield self.env.timeout(ending.remaining / ending.rate)
        if plan != self._plan:
            return  # rates have changed since
        self._move()
        # The one that this was about has ended, whatever rounding says: else an end that is
        # nearer than the clock can tell would be waited for again and again.
        ended = [
            flow
            for flow in self.flows
            if flow is ending or flow.remaining <= _ENDED * flow.num_bytes
        ]
        for flow in ended:
            for resource, share in flow.uses.items():
                resource.carried += flow.remaining * share
            flow.remaining = 0.0
        self.flows = [flow for flow in self.flows if flow.remaining > 0]
        for flow in ended:
            flow.done.succeed()
        self._share_out()


def fair_rates(flows: Iterable[Flow]) -> list[float]:
    """Return the weighted max-min fair rates, bytes/s, in the order of the flows.

    All rates grow together; a flow stops where its own limit is reached or one of its resources is
    full. No rate can then be raised without lowering one that is no larger.
    """
    chosen = list(flows)
    rates: dict[Flow, float] = {}
    free = {resource: resource.capacity for flow in chosen for resource in flow.uses}
    growing = dict.fromkeys(chosen)
    while growing:
        load = dict.fromkeys(free, 0.0)
        for flow in growing:
            for resource, share in flow.uses.items():
                load[resource] += share
        full = {r: max(0.0, free[r]) / share for r, share in load.items() if share > 0}
        level = min([*full.values(), *(flow.max_rate for flow in growing)])
        stopping = [
            flow
            for flow in growing
            if flow.max_rate <= level or any(full[r] <= level for r in flow.uses)
        ]
        for flow in stopping:
            rates[flow] = level
            del growing[flow]
            for resource, share in flow.uses.items():
                free[resource] -= level * share
    return [rates[flow] for flow in chosen]
