"""The engine's schedule: any `ZenFlowConfig`, the presets for baselines included.

Mirrors `zenflow.step.engine` step for step: gradients leave as backward finishes each segment (or
at the step, in keep mode), the host takes them in behind the next step, blocks whose window ends
are updated, and what lands is uploaded behind the backward of its landing step. Under the exact
rule the device moves weights by each gradient itself until its update lands. On a GPU in release
mode backward itself packs gradients into a ring, and waits where the link leaves no room.
The host launches a GPU's kernels ahead, and no step is shorter than all of its launches.

Several devices divide the update: `sim.schedules.parallel.averaged` has DDP's ranks, and
`sim.schedules.parallel.zenflow` FSDP2's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import simpy

from sim.lanes import Work
from sim.machine import Machine, Process
from sim.schedules.drive import Drive
from sim.schedules.intake import by_segment, intake_of, total
from sim.schedules.ring import Ring
from sim.schedules.schedule import AbstractSchedule, Step, Waits
from sim.timing.block_plan import BlockPlan, PlannedBlock
from sim.timing.changed_uploads import uploaded_bytes
from sim.timing.costs import StepCosts
from sim.timing.division import Division
from sim.timing.fresh_steps import late_bytes, measured_bytes, moved_bytes
from sim.timing.host_passes import HostPass
from zenflow.config import ZenFlowConfig
from zenflow.host_state import gradient_bytes


@dataclass(slots=True)
class Landing:
    """An update in flight: all due blocks of one segment at one boundary."""

    segment: int
    num_bytes: float
    computed: simpy.Event
    uploaded: simpy.Event | None = None


@dataclass(slots=True)
class _SegmentState:
    """Events on which later work on a segment waits."""

    copied: list[simpy.Event] = field(default_factory=list)
    """Copy of the last gradient to the host."""
    staging_free: list[simpy.Event] = field(default_factory=list)
    """Host tasks that read the staged gradient."""
    last_update: list[simpy.Event] = field(default_factory=list)
    """Host task of the last update of the segment's blocks."""
    earlier: list[simpy.Event] = field(default_factory=list)
    """Host tasks of earlier steps that read the staged gradient."""


class EngineSchedule(AbstractSchedule):
    """The engine's rule on a simulated machine.

    Attributes:
        plan: Who owns what, in which block.
    """

    _waits_type: ClassVar[type[Waits]] = Waits

    def __init__(
        self,
        machine: Machine,
        costs: StepCosts,
        config: ZenFlowConfig,
        *,
        releases: bool = True,
        division: Division | None = None,
        state_on_drive: bool = False,
    ) -> None:
        """Lay out the blocks.

        Args:
            machine: What it runs on.
            costs: Of one step of the model.
            config: The update rule's settings.
            releases: Whether gradients leave during backward, or at ``step()``.
            division: Parts of the machine's devices; None is one device's whole.
            state_on_drive: Whether the host's states are on the machine's drives.

        Raises:
            ConfigError: States on a drive that the machine lacks, or of settings whose states the
                engine does not put there.
        """
        super().__init__(machine, costs)
        self._config = config
        self._division = division or Division()
        self._waits = self._waits_type(machine)
        self._releases = releases
        self.plan = BlockPlan(costs, config, self._division, on_drive=state_on_drive)
        self._drive = None if self.plan.drive is None else Drive(machine, self.plan.drive)
        self._calendar = self.plan.calendar()
        self._states = [_SegmentState() for _ in costs.segments]
        self._intake = intake_of(self.plan, costs)
        size = gradient_bytes(config.gradient_link, costs.dtype_bytes)
        self._uploaded = uploaded_bytes(config, costs.dtype_bytes, self.plan.depth)
        self._sizes = [float(share.deferred * size) for share in self.plan.shares]
        self._moved: list[float] = []
        self._taken: list[float] = []
        self._backward: list[float] = []
        """Seconds of each segment's backward in release mode."""
        self._wants_selection = [False] * len(self.plan.blocks)
        self._landings: defaultdict[int, list[Landing]] = defaultdict(list)
        self._ring: Ring | None = None
        if self._releases and not machine.hardware.device.is_cpu:  # there gradients just wait
            self._ring = Ring(machine, self.plan.ring)
        self._late_bytes = late_bytes(
            config,
            costs.dtype_bytes,
            is_packed=self._ring is not None,
            is_cpu=machine.hardware.device.is_cpu,
        )

    def _step(self, step: int) -> Step:
        machine, reducing = self.machine, 0.0
        launched = self._launch(step)
        moved = self.plan.moved(self._calendar, step)
        if moved != self._moved:  # most steps move what the one before has moved
            self._moved = moved
            self._taken = [self._taking_seconds(index) for index in range(len(moved))]
            own = zip(self.costs.segments, self._taken, strict=True)
            self._backward = [segment.backward + taken for segment, taken in own]
        self._waits.seconds = 0.0
        if self._releases:
            stepped = self._step_device(step, self._compute(step))
        else:
            reduced = self._keep(step)
            yield self.computed
            reducing = yield from self.wait(reduced, "reduce", step)
            self._send_kept(step)
            stepped = self._step_device(step)
        yield stepped
        if launched is not None:  # the device has waited, and for no stall
            yield launched
        waited = machine.env.now - reducing - self._waits.seconds
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
            yield from self._upload_at_once(at_once, step)
            yield from self._wait_landed(at_once, step)
        self._landings.pop(step, None)
        return waited

    # ---- the device ---------------------------------------------------------------------------

    def _launch(self, step: int) -> simpy.Event | None:
        """Queue a step's launches by the host, and return the event of their end.

        The training thread launches kernels ahead of a GPU, with the engine's Python between them.
        A step is the longer of the two.
        """
        if not self.costs.are_launched:
            return None
        matrices = sum(share.matrices for share in self.plan.shares)
        seconds = self.costs.launching_seconds + self.step_overhead
        seconds += matrices * self.machine.hardware.overheads.bucket.value
        return self.machine.launch.submit("launch", step, Work(seconds=seconds))

    def _compute(self, step: int) -> list[simpy.Event]:
        """Queue forward and backward in release mode, with what each segment's end sets off.

        Returns:
            What the device has to wait for behind them: room in the ring, and reductions.
        """
        room: list[simpy.Event] = []
        for _ in range(self.costs.accumulation - 1):
            self.forward(step)
            self.backward(step)
        begun = self.forward(step)
        # Gradients of a segment are taken to come evenly while its backward runs.
        for index in reversed(range(len(self.costs.segments))):
            passed = self.backward_of(index, step, self._backward[index], room)
            room = self._send(index, step, passed, begun)
            self._waits.watch(passed, [("d2h", room)], step)
            begun = passed
        return room

    def _keep(self, step: int) -> list[simpy.Event]:
        """Queue forward and backward in keep mode; return the ends of all reductions."""
        return self.compute(step, passes=2.0)

    def _taking_seconds(self, index: int) -> float:
        """Return the seconds in which backward lets a segment's gradients go."""
        seconds = self._measuring_seconds(index) + self._moving_seconds(index)
        if self._ring:  # where there is none a copy packs
            packed = self.plan.shares[index].deferred * self.costs.dtype_bytes
            seconds += packed / self.machine.pack_rate
        return seconds

    def _measuring_seconds(self, index: int) -> float:
        """Return the seconds in which a segment's gradients are measured and gathered."""
        share, overheads = self.plan.shares[index], self.machine.hardware.overheads
        if not share.matrices:
            return 0.0
        size = self.costs.dtype_bytes
        seconds = share.split * size / overheads.intake_bandwidth.value
        measured = share.split * measured_bytes(self._config, size)
        seconds += measured / self.costs.elementwise_bandwidth
        if self.machine.hardware.device.is_cpu:  # a GPU's training thread launches ahead
            seconds += share.matrices * overheads.bucket.value
        return seconds

    def _moving_seconds(self, index: int) -> float:
        """Return the seconds of a segment's fresh steps."""
        moved = self._moved[index] * moved_bytes(self.costs.dtype_bytes)
        return moved / self.costs.elementwise_bandwidth

    def _step_device(self, step: int, after: Sequence[simpy.Event] = ()) -> simpy.Event:
        """Queue AdamW on all that the device owns; return the event of its end."""
        overheads = self.machine.hardware.overheads
        rate = overheads.column_update or overheads.device_update
        important = self.plan.important / rate.value
        seconds = self.step_overhead + important + self.update_seconds(self.plan.resident)
        return self.machine.compute("step", seconds, step, after)

    def _send_kept(self, step: int) -> None:
        """Queue what becomes of gradients that stayed until the step.

        All are measured, then each leaves behind its fresh step, and updates land, before the
        device updates what it owns.
        """
        indices = range(len(self.costs.segments))
        self.machine.compute("step", sum(map(self._measuring_seconds, indices)), step)
        for index in reversed(indices):
            moved = self.machine.compute("step", self._moving_seconds(index), step)
            self._send(index, step, moved, moved)

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
        uploads = self._upload(landings, step, after=[passed])
        state, num_bytes = self._states[index], self._sizes[index]
        if not num_bytes:
            return []
        self._make_room(index, step)
        if self._ring:
            copied, room = self._ring.send(
                num_bytes, step, (begun, passed), state.staging_free, uploads
            )
        else:
            work, room = self.machine.down(num_bytes, packs=True), []
            copied = self.machine.d2h.submit("grads", step, work, [passed, *state.staging_free])
        state.copied = [copied]
        return room

    def _landing(self, step: int) -> list[Landing]:
        """Return the updates that land in a step, in the order of forward."""
        return sorted(self._landings[step], key=lambda item: item.segment)

    def _upload(
        self, landings: list[Landing], step: int, after: list[simpy.Event]
    ) -> list[simpy.Event]:
        """Queue one copy of all these updates: what the engine releases together goes together.

        Returns:
            Its end, if there is anything to copy.
        """
        if not landings:
            return []
        num_bytes = sum(item.num_bytes for item in landings)
        late = 0.0
        if self._late_bytes and self._calendar.lag(step):  # a gradient came since
            moved = num_bytes / self.costs.dtype_bytes * self._late_bytes
            late = moved / self.costs.elementwise_bandwidth
        work = self.machine.up(num_bytes, packs=True, late=late)
        computed = [item.computed for item in landings]
        done = self.machine.h2d.submit("params", step, work, [*after, *computed])
        for item in landings:
            item.uploaded = done
        return [done]

    def _upload_at_once(self, landings: list[Landing], step: int) -> Process:
        """Queue the uploads of a step that lands its own updates: a copy behind the last one."""
        self._upload(landings, step, after=[])
        yield from ()

    def _wait_landed(self, landings: list[Landing], step: int) -> Process:
        """Wait for updates that must have landed, and record the stall by its cause."""
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
        """Return the blocks whose window ends."""
        if self._calendar.selects(step):
            self._wants_selection = [True] * len(self._wants_selection)
        next_due = self._calendar.next_due
        return [block for block in self.plan.blocks if next_due[block.index] == step]

    def _make_room(self, index: int, step: int) -> None:
        """Queue what the host does before a segment's next gradients have room there."""
        work, state = self._intake.stage(index), self._states[index]
        if work.num_bytes:
            before = [*state.copied, *state.staging_free]
            state.staging_free = [self._submit(index, work, step - 1, before, deadline=step)]

    def _take_in(self, updating: list[PlannedBlock], step: int) -> None:
        """Queue the intake of this step's gradients and these updates, segment by segment.

        A segment's staging is so free in the order in which backward brings the next gradients.
        """
        taken = self._intake.take_in(self._calendar, step)
        members = by_segment([block for block in updating if block.elements])
        for index in reversed(range(len(self._states))):
            state, work = self._states[index], taken[index]
            before = [*state.copied, *state.staging_free]
            state.earlier, state.staging_free = state.staging_free, []
            if work.num_bytes:
                done = self._submit(index, work, step, before, deadline=step + 1)
                state.staging_free = [done]
            self._update(index, members[index], step)

    def _submit(
        self, index: int, work: HostPass, step: int, after: list[simpy.Event], deadline: int
    ) -> simpy.Event:
        """Queue a task of the host on a segment that is not a window's end."""
        return self._host_task(index, self._intake.name, work, step, after, deadline)

    def _host_task(
        self,
        index: int,
        name: str,
        work: HostPass,
        step: int,
        after: list[simpy.Event],
        deadline: int,
    ) -> simpy.Event:
        """Queue a task of the host on a segment; later segments first, as backward is."""
        if self._drive is not None:
            return self._drive.submit(index, name, step, work, after, deadline=deadline)
        made = self.machine.host_work(work.num_bytes, work.steps)
        return self.machine.host.submit(name, step, made, after, deadline=deadline, rank=-index)

    def _update(self, index: int, due: list[PlannedBlock], step: int) -> None:
        """Queue the end of the windows of a segment's blocks, if there are any."""
        if not due:
            return
        lag, state = self._calendar.lag(step), self._states[index]
        holds = any(self._intake.holds_staging(block, lag) for block in due)
        work = total(self._intake.end(block, lag) for block in due)
        after = [*state.copied, *state.staging_free, *state.last_update]
        done = self._host_task(index, "adam", work, step, after, deadline=step + lag)
        state.last_update = [done]
        if holds:
            state.staging_free.append(done)
        size = self._uploaded if lag else self.costs.dtype_bytes
        num_bytes = sum(block.elements for block in due) * size
        self._landings[step + lag].append(Landing(index, num_bytes, done))

    def _close(self, due: list[PlannedBlock], step: int) -> None:
        for block in due:
            self._wants_selection[block.index] = False
            self._calendar.close(block.index, step)

    @staticmethod
    def _can_select(block: PlannedBlock) -> bool:
        return block.shape.num_important > 0 and block.elements > 0

    def _select(self, blocks: list[PlannedBlock], step: int) -> Process:
        """Wait for the blocks' host work, hand columns over, and start their updates."""
        machine = self.machine
        since = machine.env.now
        members = by_segment(blocks)
        for index in members:
            state = self._states[index]
            tasks = state.staging_free if self._intake.takes_due else state.earlier
            for event in [*state.copied, *tasks, *state.last_update]:
                if not event.processed:
                    yield event
        yield machine.env.timeout(len(blocks) * machine.hardware.overheads.select.value)
        yield from self._rename(blocks, step)
        machine.stall("select", since, step)
        for index, due in members.items():
            self._update(index, due, step)
        self._close(blocks, step)

    def _rename(self, blocks: Sequence[PlannedBlock], step: int) -> Process:
        """Write the weights of columns that have changed owner; beside the rest it is nothing."""
        yield from ()
