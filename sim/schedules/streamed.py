"""The engine's schedule where weights of layers live on the host and visit the device.

Mirrors `zenflow.streaming`. A layer's weights come before its forward and before its backward, and
the next layer's come meanwhile. Few layers are there at a time. The one that is given up is the
farthest from the layer at work. It is given up when its weights are home again, and the training
thread waits for that. Sums of gradients go home between micro-batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import simpy

from sim.machine import Machine
from sim.schedules.schedule import refuse_below_1
from sim.schedules.zenflow import EngineSchedule
from sim.timing.costs import Segment, StepCosts
from zenflow.config import ZenFlowConfig
from zenflow.errors import ConfigError
from zenflow.rule.sizes import LEAST_SLOTS, STREAMED_ELEMENTS, spread


class HasElements(Protocol):
    """Part of a model that knows its size."""

    @property
    def numel(self) -> int:
        """Number of elements of all tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """How a model's layers visit the device, as the arguments of `zenflow.stream_weights` say.

    Raises:
        ConfigError: A number breaks its rule.
    """

    resident_layers: int = 0
    """Number of layers that stay on the device, evenly spread over the depth."""
    slots: int = 3
    """Largest number of visiting layers on the device."""

    def __post_init__(self) -> None:
        """Check both numbers."""
        if self.resident_layers < 0:
            raise ConfigError(f"resident_layers must be 0 or more, got {self.resident_layers}")
        refuse_below_1("slots", self.slots)
        if self.slots < LEAST_SLOTS:
            raise ConfigError(
                f"slots must be at least {LEAST_SLOTS}, got {self.slots}: one layer computes "
                "while the next one comes"
            )

    def visiting(self, segments: Sequence[HasElements]) -> list[int]:
        """Return the segments whose weights visit the device, in the order of forward.

        Args:
            segments: Segments, or layers, of a whole model.

        Raises:
            ConfigError: There are fewer layers than are to stay.
        """
        layers = layers_of(segments)
        count = len(layers)
        if self.resident_layers > count:
            raise ConfigError(
                f"resident_layers must be at most {count}, the number of layers, got "
                f"{self.resident_layers}"
            )
        stay = spread(count, self.resident_layers)
        return [layer for rank, layer in enumerate(layers) if rank not in stay]


def layers_of(segments: Sequence[HasElements]) -> list[int]:
    """Return the segments that are a model's layers: those of the size with most parameters."""
    sizes = Counter(segment.numel for segment in segments)
    usual = max(sizes, key=lambda size: sizes[size] * size)
    return [index for index, segment in enumerate(segments) if segment.numel == usual]


def streamed_elements(segment: Segment) -> int:
    """Return the number of a layer's weights that visit the device."""
    sizes = [rows * columns for rows, columns in segment.matrices]
    return sum(size for size in sizes if size >= STREAMED_ELEMENTS)


class StreamedEngineSchedule(EngineSchedule):
    """The engine's schedule on one device that the weights of layers visit."""

    def __init__(
        self,
        machine: Machine,
        costs: StepCosts,
        config: ZenFlowConfig,
        *,
        streams: Streams,
        **settings: Any,
    ) -> None:
        """Let all visiting layers be at home.

        Args:
            machine: What it runs on.
            costs: Of one step of the model.
            config: The update rule's settings.
            streams: Which layers visit the device.
            settings: Further arguments of `EngineSchedule`.

        Raises:
            ConfigError: The rule's settings are none that can be predicted with streamed weights.
        """
        super().__init__(machine, costs, config, **settings)
        _check(config, releases=self._releases)
        self._slots = streams.slots
        visiting = streams.visiting(costs.segments)
        self._rank = {index: rank for rank, index in enumerate(visiting)}
        self._pages = [
            float(streamed_elements(costs.segments[index]) * costs.dtype_bytes)
            for index in visiting
        ]
        self._here: dict[int, simpy.Event] = {}  # by rank: arrived
        self._passes: dict[int, simpy.Event] = {}  # by rank: last use by compute
        self._home: dict[int, simpy.Event] = {}  # by rank: the last way home
        self._sums: dict[int, simpy.Event] = {}  # by rank: at home
        self._coming_sums: dict[int, simpy.Event] = {}

    # ---- visits -------------------------------------------------------------------------------

    def _begin_layer(self, index: int, step: int, *, backward: bool) -> list[simpy.Event]:
        """Let a segment's weights come, and the next ones; return what its pass waits for."""
        rank = self._rank.get(index)
        if rank is None:
            return []
        waits = self._fetch(rank, rank, step)
        arrived = self._here[rank]
        if backward:
            self._fetch_sums(rank, step)
        following = rank + (-1 if backward else 1)
        if 0 <= following < len(self._pages):
            # The training thread waits for the memory of whoever is given up, then goes on.
            waits += self._fetch(following, rank, step)
            if backward:
                self._fetch_sums(following, step)
        elif not backward:  # whose backward comes first
            self._fetch_sums(rank, step)
        sums = self._coming_sums.pop(rank, None) if backward else None
        return [event for event in (arrived, sums, *waits) if event is not None]

    def _fetch(self, rank: int, at_work: int, step: int) -> list[simpy.Event]:
        """Queue a page's way up unless it is here; return what gives memory for it back."""
        if rank in self._here:
            return []
        freed: list[simpy.Event] = []
        while len(self._here) >= self._slots:
            idle = [other for other in self._here if other != at_work]
            farthest = max(idle, key=lambda other: abs(other - rank))
            del self._here[farthest]
            freed += [
                events[farthest] for events in (self._passes, self._home) if farthest in events
            ]
        before = [*freed, *self._launched()]
        work = self.machine.up(self._pages[rank])
        self._here[rank] = self.machine.weights_up.submit("weights", step, work, before)
        return freed

    def _launched(self) -> list[simpy.Event]:
        """Return compute that is over when the training thread goes on: where a CPU computes."""
        is_cpu = self.machine.hardware.device.is_cpu
        return [self._last] if is_cpu and self._last is not None else []

    def _fetch_sums(self, rank: int, step: int) -> None:
        home = self._sums.pop(rank, None)
        if home is not None:
            work = self.machine.up(self._pages[rank])
            # Compute's memory: what has been launched may be using it.
            before = [home] if self._last is None else [home, self._last]
            self._coming_sums[rank] = self.machine.weights_up.submit("weights", step, work, before)

    # ---- passes -------------------------------------------------------------------------------

    def forward(self, step: int) -> simpy.Event:
        """Queue the forward of one micro-batch, segment by segment."""
        return [self.forward_of(index, step) for index in range(len(self.costs.segments))][-1]

    def forward_of(self, index: int, step: int) -> simpy.Event:
        """Queue one segment's forward, before which its weights arrive; return its end."""
        waits = [
            *(("weights", event) for event in self._begin_layer(index, step, backward=False)),
            *(self._room(index) if self._offloads else []),
        ]
        done = self.compute_behind("forward", self.costs.segments[index].forward, step, waits)
        if self._offloads:
            self._leave_activations(index, step, done)
        self._pass(index, done)
        return done

    def backward(self, step: int) -> simpy.Event:
        """Queue the backward of a micro-batch that is not the step's last: its sums go home."""
        done = None
        for index in reversed(range(len(self.costs.segments))):
            done = self.backward_of(index, step)
            rank = self._rank.get(index)
            if rank is not None:
                work = self.machine.down(self._pages[rank])
                self._sums[rank] = self.machine.weights_down.submit("weights", step, work, [done])
        assert done is not None
        return done

    def backward_of(
        self,
        index: int,
        step: int,
        seconds: float | None = None,
        after: Sequence[simpy.Event] = (),
    ) -> simpy.Event:
        """Queue one segment's backward, before which its weights arrive; return its end."""
        taken = self.costs.segments[index].backward if seconds is None else seconds
        waits = [
            *(("weights", event) for event in self._begin_layer(index, step, backward=True)),
            *(self._fetch_activations(index, step) if self._offloads else []),
        ]
        done = self.compute_behind("backward", taken, step, waits, after)
        if self._offloads:
            self._passed = [*self._passed[-1:], done]
        self._pass(index, done)
        return done

    def _pass(self, index: int, done: simpy.Event) -> None:
        rank = self._rank.get(index)
        if rank is not None:
            self._passes[rank] = done

    def _send(
        self, index: int, step: int, passed: simpy.Event, begun: simpy.Event
    ) -> list[simpy.Event]:
        """Queue what a segment's backward sets off, and its moved weights' way home."""
        room = super()._send(index, step, passed, begun)
        rank = self._rank.get(index)
        if rank is None:
            return room
        uploads = [
            item.uploaded
            for item in self._landings[step]
            if item.segment == index and item.uploaded is not None
        ]
        if self._moved[index] or uploads:
            work = self.machine.down(self._pages[rank])
            self._home[rank] = self.machine.weights_down.submit(
                "weights", step, work, [passed, *uploads]
            )
        return room


def _check(config: ZenFlowConfig, *, releases: bool) -> None:
    """Refuse settings whose visits are not simulated.

    Raises:
        ConfigError: There is such a setting.
    """
    if not releases:
        raise ConfigError("streamed weights need gradients that leave in backward: release mode")
    if config.topk_ratio:
        raise ConfigError(
            f"streamed weights are predicted with topk_ratio=0, got {config.topk_ratio:g}: "
            "selections let weights come and go once more, which is not simulated"
        )
    if not config.overlap_step or config.full_warm_up_rounds:
        raise ConfigError(
            "streamed weights are predicted where updates land behind the next backward: leave "
            "overlap_step=False and full_warm_up_rounds out"
        )
