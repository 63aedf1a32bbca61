"""The engine's schedule where weights of layers live on the host and visit the device.

Mirrors `zenflow.streaming`. A layer's weights come before its forward and before its backward, and
the next layer's come meanwhile. Few layers are there at a time. The one that is given up is the
farthest from the layer at work. It is given up when its weights are home again, and the training
thread waits for that. Sums of gradients go home between micro-batches.

Important columns are stepped where they are, in the device's own memory. Their layer's weights get
them at the next visit. Whoever else writes to weights lets their layer visit once more: columns
that change owner, and updates that land behind backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import simpy

from sim.lanes import SerialLane
from sim.machine import Machine, Process
from sim.schedules.streams import Streams, streamed_elements
from sim.schedules.zenflow import EngineSchedule, Landing
from sim.timing.block_plan import PlannedBlock
from sim.timing.costs import StepCosts
from zenflow.config import ZenFlowConfig
from zenflow.errors import ConfigError
from zenflow.rule.sizes import COLUMN_STATE_BYTES, MOVING_BYTES, SUMS_AHEAD_BYTES

_MASTER_BYTES = 4
"""Bytes of an important column's element in the device's own memory."""


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
            ConfigError: The engine trains no streamed weights with these settings.
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
        self._at_work: int | None = None
        # Events by rank: the way up, the last use by compute, the last way home, sums likewise.
        self._here: dict[int, simpy.Event] = {}
        self._passes: dict[int, simpy.Event] = {}
        self._home: dict[int, simpy.Event] = {}
        self._sums: dict[int, simpy.Event] = {}
        self._coming_sums: dict[int, simpy.Event] = {}
        # Ranks whose weights have changed on the device alone, and whose important columns are
        # not yet those of the device's optimizer: there, and at home.
        self._changed: set[int] = set()
        self._old_here: set[int] = set()
        self._old_at_home: set[int] = set()

    # ---- visits -------------------------------------------------------------------------------

    def _begin_layer(
        self, index: int, step: int, *, backward: bool
    ) -> tuple[list[simpy.Event], float]:
        """Let a segment's weights come, and the next ones.

        Returns:
            What the segment's pass waits for, and the seconds in which important columns are
            written first.
        """
        rank = self._rank.get(index)
        if rank is None:
            return [], 0.0
        self._at_work = None
        waits = self._come(rank, step)
        seconds = 0.0
        if rank in self._old_here:
            self._old_here.discard(rank)
            written = self.plan.shares[index].important * (_MASTER_BYTES + self.costs.dtype_bytes)
            seconds = written / self.costs.elementwise_bandwidth
            waits += self._going_home(rank)
        self._at_work = rank
        following = rank + (-1 if backward else 1)
        if 0 <= following < len(self._pages):
            # The training thread waits for the memory of whoever is given up, then goes on.
            waits += self._fetch(following, step)
        return waits, seconds

    def _come(self, rank: int, step: int) -> list[simpy.Event]:
        """Have a page here; return what has to be waited for."""
        return [*self._fetch(rank, step), self._here[rank]]

    def _going_home(self, rank: int) -> list[simpy.Event]:
        """Return the page's way home, which has to be over before somebody writes to the page."""
        return [self._home[rank]] if rank in self._home else []

    def _fetch(self, rank: int, step: int) -> list[simpy.Event]:
        """Queue a page's way up unless it is here; return what gives memory for it back."""
        if rank in self._here:
            return []
        freed: list[simpy.Event] = []
        while len(self._here) >= self._slots:
            idle = [other for other in self._here if other != self._at_work]
            freed += self._give_up(max(idle, key=lambda other: abs(other - rank)), step)
        before = [*freed, *self._launched()]
        work = self.machine.up(self._pages[rank])
        self._here[rank] = self.machine.weights_up.submit("weights", step, work, before)
        if rank in self._old_at_home:
            self._old_here.add(rank)
        return freed

    def _give_up(self, rank: int, step: int) -> list[simpy.Event]:
        """Give a page up; return what has to be over before its memory is free."""
        del self._here[rank]
        used = [self._passes[rank]] if rank in self._passes else []
        if rank in self._changed:
            self._send_home(rank, step, used)
        self._old_here.discard(rank)
        return [*used, *self._going_home(rank)]

    def _send_home(self, rank: int, step: int, after: Sequence[simpy.Event]) -> None:
        """Queue the way home of changed weights."""
        work = self.machine.down(self._pages[rank])
        self._home[rank] = self.machine.weights_down.submit("weights", step, work, after)
        self._changed.discard(rank)
        if rank not in self._old_here:
            self._old_at_home.discard(rank)

    def _launched(self) -> list[simpy.Event]:
        """Return compute that is over when the training thread goes on: where a CPU computes."""
        is_cpu = self.machine.hardware.device.is_cpu
        return [self._last] if is_cpu and self._last is not None else []

    def _activations_down(self) -> tuple[SerialLane, str]:
        return self.machine.weights_down, "weights"

    def _activations_up(self) -> tuple[SerialLane, str]:
        return self.machine.weights_up, "weights"

    # ---- sums ---------------------------------------------------------------------------------

    def _fetch_sums(self, rank: int, step: int, after: simpy.Event | None) -> None:
        """Queue the way back of a layer's sums, if they are at home, into compute's memory."""
        home = self._sums.pop(rank, None)
        if home is not None:
            before = [home] if after is None else [home, after]
            work = self.machine.up(self._pages[rank])
            self._coming_sums[rank] = self.machine.weights_up.submit("weights", step, work, before)

    def _restore_sums(self, rank: int, step: int, done: simpy.Event) -> simpy.Event:
        """Let backward add to a layer's sums, while the next ones come; return the end of that.

        The next layers' come until so many bytes are on their way that others have to wait.
        """
        self._fetch_sums(rank, step, done)
        arrived = self._coming_sums.pop(rank, None)
        if arrived is None:
            return done
        following = rank - 1
        while (
            following >= 0
            and sum(map(self._pages.__getitem__, self._coming_sums)) < SUMS_AHEAD_BYTES
        ):
            self._fetch_sums(following, step, done)
            following -= 1
        return self.compute_behind("backward", 0.0, step, [("weights", arrived)])

    # ---- passes -------------------------------------------------------------------------------

    def forward(self, step: int) -> simpy.Event:
        """Queue the forward of one micro-batch, segment by segment."""
        return [self.forward_of(index, step) for index in range(len(self.costs.segments))][-1]

    def forward_of(self, index: int, step: int) -> simpy.Event:
        """Queue one segment's forward, before which its weights arrive; return its end."""
        came, writing = self._begin_layer(index, step, backward=False)
        waits = [
            *(("weights", event) for event in came),
            *(self._room(index) if self._offloads else []),
        ]
        taken = self.costs.segments[index].forward + writing
        done = self.compute_behind("forward", taken, step, waits)
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
        came, writing = self._begin_layer(index, step, backward=True)
        waits = [
            *(("weights", event) for event in came),
            *(self._fetch_activations(index, step) if self._offloads else []),
        ]
        done = self.compute_behind("backward", taken + writing, step, waits, after)
        if self._offloads:
            self._passed = [*self._passed[-1:], done]
        if index in self._rank:
            done = self._restore_sums(self._rank[index], step, done)
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
            self._send_home(rank, step, [passed, *uploads])
        return room

    # ---- behind backward ----------------------------------------------------------------------

    def _step_device(self, step: int, after: Sequence[simpy.Event] = ()) -> simpy.Event:
        """Queue AdamW on what the device owns: important columns of weights are old then."""
        for index, rank in self._rank.items():
            if self.plan.shares[index].important:
                self._old_at_home.add(rank)
                if rank in self._here:
                    self._old_here.add(rank)
        return super()._step_device(step, after)

    def _write_to(self, rank: int, step: int) -> list[simpy.Event]:
        """Have a page here for somebody who writes to it; return what has to be waited for."""
        waits = [*self._come(rank, step), *self._going_home(rank)]
        self._old_here.discard(rank)
        self._changed.add(rank)
        return waits

    def _rename(self, blocks: Sequence[PlannedBlock], step: int) -> Process:
        """Write the weights of columns that have changed owner.

        All important columns of these blocks are taken to do so. Those of a group leave before
        any come, so that a layer of a large group comes twice.
        """
        for group in _groups(blocks):
            segments = dict.fromkeys(block.segment for block in group)
            ranks = [self._rank[index] for index in segments if index in self._rank]
            for rank in (*(rank for rank in ranks if rank in self._old_at_home), *ranks):
                for event in self._write_to(rank, step):
                    if not event.processed:
                        yield event

    def _upload_at_once(self, landings: list[Landing], step: int) -> Process:
        """Queue the uploads of a step that lands its own updates, layer by layer as they come."""
        self._upload([own for own in landings if own.segment not in self._rank], step, after=[])
        for index, rank in reversed(self._rank.items()):
            own = [landing for landing in landings if landing.segment == index]
            if own:
                yield from self.wait(self._write_to(rank, step), "weights", step)
                self._send_home(rank, step, self._upload(own, step, after=[]))


def _groups(blocks: Sequence[PlannedBlock]) -> Iterator[list[PlannedBlock]]:
    """Yield the blocks whose columns move together, as `zenflow.columns.handover` has them."""
    group: list[PlannedBlock] = []
    num_bytes = 0
    for block in blocks:
        own = COLUMN_STATE_BYTES * block.shape.num_important * block.shape.num_rows
        if group and num_bytes + own > MOVING_BYTES:
            yield group
            group, num_bytes = [], 0
        group.append(block)
        num_bytes += own
    if group:
        yield group


def _check(config: ZenFlowConfig, *, releases: bool) -> None:
    """Refuse settings that the engine refuses for streamed weights.

    Raises:
        ConfigError: There is such a setting.
    """
    if not releases:
        raise ConfigError("streamed weights need gradients that leave in backward: release mode")
    if config.uploads_changes:
        raise ConfigError("streamed weights come from the host anyway: leave uploads out")
    if config.topk_ratio == 1:
        raise ConfigError(
            "streamed weights need state on the host: choose a topk_ratio below 1, got 1"
        )
