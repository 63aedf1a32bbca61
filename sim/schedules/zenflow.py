"""The engine's schedule: any `ZenFlowConfig`, the presets for baselines included.

Mirrors `zenflow.step.engine` step for step: gradients leave as backward finishes each segment (or
at the step, in keep mode), the host takes them in behind the next step, blocks whose window ends
are updated, and what lands is uploaded behind the backward of its landing step. On a GPU in
release mode backward itself packs gradients into a ring, and waits where the link leaves no room.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import simpy

from sim.machine import Machine, Process
from sim.schedules.ring import Ring
from sim.schedules.schedule import AbstractSchedule, Step
from sim.timing.block_plan import (
    BlockPlan,
    PlannedBlock,
    intake_bytes,
    takes_last_in,
    update_bytes,
)
from sim.timing.costs import StepCosts
from zenflow.config import ZenFlowConfig


@dataclass(slots=True)
class _Landing:
    """An update in flight: all due blocks of one segment at one boundary."""

    segment: int
    num_bytes: int
    computed: simpy.Event
    uploaded: simpy.Event | None = None


@dataclass(slots=True)
class _SegmentState:
    """What later work on a segment waits for."""

    copied: list[simpy.Event] = field(default_factory=list)
    """Copy of its last gradient."""
    staging_free: list[simpy.Event] = field(default_factory=list)
    """Host tasks that read its staged gradient."""
    last_update: list[simpy.Event] = field(default_factory=list)
    """Host task of the last update of its blocks."""


class EngineSchedule(AbstractSchedule):
    """The engine's rule on a simulated machine; data-parallel devices each do all of it.

    Attributes:
        plan: Who owns what, in which block.
    """

    def __init__(
        self, machine: Machine, costs: StepCosts, config: ZenFlowConfig, *, releases: bool = True
    ) -> None:
        """Lay out the blocks.

        Args:
            machine: What it runs on.
            costs: Of one step of the model.
            config: The update rule's settings.
            releases: Whether gradients leave during backward, or at ``step()``.
        """
        super().__init__(machine, costs)
        self._config = config
        # Ranks average their gradients after backward: release mode would come too early.
        self._releases = releases and self.devices == 1
        self.plan = BlockPlan(costs, config)
        self._calendar = self.plan.calendar()
        self._states = [_SegmentState() for _ in costs.segments]
        self._counts = [0] * len(self.plan.blocks)
        self._wants_selection = [False] * len(self.plan.blocks)
        self._landings: defaultdict[int, list[_Landing]] = defaultdict(list)
        self._ring: Ring | None = None
        if self._releases and not machine.hardware.device.is_cpu:  # there gradients just wait
            self._ring = Ring(machine, self.plan.ring)

    def _step(self, step: int) -> Step:
        machine, reducing = self.machine, 0.0
        if self._ring:
            self._ring.pressed = 0.0
        if self._releases:
            room = self._compute(step)
            stepped = machine.compute("step", self._step_seconds(), step, room)
        else:
            reduced = self.compute(step, passes=2.0)
            yield self.computed
            reducing = yield from self.wait(reduced, "reduce", step)
            stepped = machine.compute("step", self._step_seconds(), step)
            for index in reversed(range(len(self.costs.segments))):
                self._send(index, step, stepped, stepped)
        yield stepped
        waited = machine.env.now - reducing - (self._ring.pressed if self._ring else 0.0)
        landing = self._landing(step)
        due = self._begin(step)
        selecting = [b for b in due if self._wants_selection[b.index] and self._can_select(b)]
        chosen = {block.index for block in selecting}
        rest = [block for block in due if block.index not in chosen]
        self._take_in(rest, step)
        self._close(rest, step)
        yield from self._wait_landed(landing, step)
        if selecting:
            yield from self._select(selecting, step)
        if self._calendar.lag(step) == 0:
            at_once = self._landing(step)
            self._upload(at_once, step, after=[])  # as one copy, behind the last update
            yield from self._wait_landed(at_once, step)
        self._landings.pop(step, None)
        return waited

    # ---- the device ---------------------------------------------------------------------------

    def _compute(self, step: int) -> list[simpy.Event]:
        """Queue forward and backward in release mode, with what each segment's end sets off.

        Returns:
            What the device has to wait for behind them: room in the ring.
        """
        machine, segments = self.machine, self.costs.segments
        room: list[simpy.Event] = []
        for _ in range(self.costs.accumulation - 1):
            self.forward(step)
            self.backward(step)
        begun = self.forward(step)
        # Gradients of a segment are taken to come evenly while its backward runs.
        for index in reversed(range(len(segments))):
            seconds = segments[index].backward + self._intake(index)
            if self._ring:  # where there is none a copy packs
                seconds += self._gradient_bytes(index) / machine.pack_rate
            passed = machine.compute("backward", seconds, step, room)
            room = self._send(index, step, passed, begun)
            begun = passed
        return room

    def _intake(self, index: int) -> float:
        """Return the seconds in which a segment's gradients are measured and gathered."""
        share, overheads = self.plan.shares[index], self.machine.hardware.overheads
        if not share.matrices:
            return 0.0
        size = share.split * self.costs.dtype_bytes
        seconds = size / overheads.intake_bandwidth.value
        if self.machine.hardware.device.is_cpu:  # a GPU's training thread runs ahead
            seconds += share.matrices * overheads.bucket.value
        return seconds

    def _gradient_bytes(self, index: int) -> float:
        return float(self.plan.shares[index].deferred * self.costs.dtype_bytes)

    def _step_seconds(self) -> float:
        seconds = self.step_overhead + self.update_seconds(self.plan.on_device)
        if not self._releases:
            seconds += sum(self._intake(index) for index in range(len(self.costs.segments)))
        return seconds

    # ---- copies -------------------------------------------------------------------------------

    def _send(
        self, index: int, step: int, passed: simpy.Event, begun: simpy.Event
    ) -> list[simpy.Event]:
        """Queue what a segment's backward sets off: uploads first, then its gradients.

        Args:
            index: Of the segment.
            step: Its step.
            passed: The end of its backward.
            begun: Its begin.

        Returns:
            What backward has to wait for before it goes on: room in the ring.
        """
        landings = [item for item in self._landings[step] if item.segment == index]
        self._upload(landings, step, after=[passed])
        state, num_bytes = self._states[index], self._gradient_bytes(index)
        if not num_bytes:
            return []
        if self._ring:
            copied, room = self._ring.send(num_bytes, step, (begun, passed), state.staging_free)
        else:
            work, room = self.machine.down(num_bytes, packs=True), []
            copied = self.machine.d2h.submit("grads", step, work, [passed, *state.staging_free])
        state.copied = [copied]
        return room

    def _landing(self, step: int) -> list[_Landing]:
        """Return what lands in a step, in the order of forward."""
        return sorted(self._landings[step], key=lambda item: item.segment)

    def _upload(self, landings: list[_Landing], step: int, after: list[simpy.Event]) -> None:
        """Queue one copy of all these updates: what the engine releases together goes together."""
        if not landings:
            return
        work = self.machine.up(sum(item.num_bytes for item in landings), packs=True)
        computed = [item.computed for item in landings]
        done = self.machine.h2d.submit("params", step, work, [*after, *computed])
        for item in landings:
            item.uploaded = done

    def _wait_landed(self, landings: list[_Landing], step: int) -> Process:
        """Wait for what must have landed, and call it by its cause."""
        if not landings:
            return
        if self._calendar.lag(step) == 0:
            copied = [e for item in landings for e in self._states[item.segment].copied]
            yield from self.wait(copied, "d2h", step)
        yield from self.wait([item.computed for item in landings], "host", step)
        uploads = [item.uploaded for item in landings if item.uploaded is not None]
        yield from self.wait(uploads, "h2d", step)

    # ---- the host -----------------------------------------------------------------------------

    def _begin(self, step: int) -> list[PlannedBlock]:
        """Count this step's gradients; return the blocks whose window ends."""
        if self._calendar.selects(step):
            self._wants_selection = [True] * len(self._wants_selection)
        next_due = self._calendar.next_due
        for block in self.plan.blocks:
            self._counts[block.index] += 1
        return [block for block in self.plan.blocks if next_due[block.index] == step]

    def _take_in(self, updating: list[PlannedBlock], step: int) -> None:
        """Queue the intake of this step's gradients and these updates, segment by segment.

        A segment's staging is so free in the order in which backward brings the next gradients.
        """
        work = self._intake_work(step)
        members = _by_segment(updating)
        for index in reversed(range(len(work))):
            state = self._states[index]
            before = [*state.copied, *state.staging_free]
            state.staging_free = []
            if work[index]:
                taken = self.machine.host_work(work[index] * self.costs.intake_factor)
                state.staging_free = [
                    self.machine.host.submit("accumulate", step, taken, before, deadline=step + 1)
                ]
            self._update(index, [block for block in members[index] if block.elements], step)

    def _intake_work(self, step: int) -> list[int]:
        """Return the bytes of DRAM that each segment's intake moves."""
        is_fused, next_due = self._is_fused(step), self._calendar.next_due
        first = intake_bytes(self._config, self.costs.dtype_bytes, is_first=True)
        later = intake_bytes(self._config, self.costs.dtype_bytes, is_first=False)
        work = [0] * len(self._states)
        for block in self.plan.blocks:
            if not (is_fused and next_due[block.index] == step):
                cost = first if self._counts[block.index] == 1 else later
                work[block.segment] += block.elements * cost
        return work

    def _is_fused(self, step: int) -> bool:
        """Whether a window's update takes its last gradient in itself."""
        return takes_last_in(self._config, self._calendar.lag(step))

    def _update(self, index: int, due: list[PlannedBlock], step: int) -> None:
        """Queue the update of a segment's blocks whose windows end, if there are any."""
        if not due:
            return
        lag, is_fused = self._calendar.lag(step), self._is_fused(step)
        size, state = self.costs.dtype_bytes, self._states[index]
        num_bytes = 0
        for block in due:
            count = self._counts[block.index]
            cost = update_bytes(self._config, size, count=count, is_fused=is_fused)
            num_bytes += block.elements * cost
        after = [*state.copied, *state.last_update]
        if not is_fused:
            after += state.staging_free
        work, deadline = self.machine.host_work(num_bytes), min(lag, 1) if is_fused else lag
        done = self.machine.host.submit("adam", step, work, after, deadline=step + deadline)
        state.last_update = [done]
        if is_fused:
            state.staging_free.append(done)
        elements = sum(block.elements for block in due)
        self._landings[step + lag].append(_Landing(index, elements * size, done))

    def _close(self, due: list[PlannedBlock], step: int) -> None:
        for block in due:
            self._counts[block.index] = 0
            self._wants_selection[block.index] = False
            self._calendar.close(block.index, step)

    @staticmethod
    def _can_select(block: PlannedBlock) -> bool:
        return block.shape.num_important > 0 and block.elements > 0

    def _select(self, blocks: list[PlannedBlock], step: int) -> Process:
        """Wait for the blocks' host work, hand columns over, and start their updates."""
        machine = self.machine
        since = machine.env.now
        members = _by_segment(blocks)
        for index in members:
            state = self._states[index]
            for event in [*state.copied, *state.staging_free, *state.last_update]:
                if not event.processed:
                    yield event
        yield machine.env.timeout(len(blocks) * machine.hardware.overheads.select.value)
        machine.stall("select", since, step)
        for index, due in members.items():
            self._update(index, due, step)
        self._close(blocks, step)


def _by_segment(blocks: Iterable[PlannedBlock]) -> defaultdict[int, list[PlannedBlock]]:
    found: defaultdict[int, list[PlannedBlock]] = defaultdict(list)
    for block in blocks:
        found[block.segment].append(block)
    return found
