"""Drive: the engine's lane of states on a drive, `zenflow.drive.lane`, on a simulated machine.

A task of the host asks for its extents when all else that it needs is there. They are read in the
order of deadlines, into a few buffers. A part of the task begins when its extent is in memory, and
a buffer is free when its extent has been written.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import simpy

from sim.lanes import SerialLane
from sim.machine import Machine
from sim.starved import Starved
from sim.timing.drive_memory import StatesOnDrive
from sim.timing.host_passes import HostPass
from zenflow.errors import ConfigError

LANE = "drive"
"""Name of the lane in a timeline, and of its stalls."""
MOST_EXTENTS = 2048
"""Number of extents from which on some that follow each other are simulated as one."""
_LEAST_BUFFERS = 4
"""Least number of buffers then: one that is read, one in use, one that is written, and another."""


@dataclass(slots=True, eq=False)
class _Part:
    """Work of a host task on one extent."""

    name: str
    step: int
    deadline: int
    rank: int
    work: HostPass
    num_bytes: float
    """Bytes of the extent."""
    task: _Task


@dataclass(slots=True, eq=False)
class _Task:
    """A host task whose parts are under way."""

    computed: simpy.Event
    """Event of the end of all parts' work."""
    written: simpy.Event
    """Event of the end of all parts' writes."""
    num_left: int
    num_unwritten: int


class Drive:
    """Buffers, and a lane each way, between a machine's drives and its host worker.

    One read at a time stands for the engine's few, which share the drive.
    """

    def __init__(self, machine: Machine, states: StatesOnDrive) -> None:
        """Start with free buffers.

        Args:
            machine: What it runs on.
            states: The extents.

        Raises:
            ConfigError: The machine has no drives.
        """
        if machine.hardware.nvme is None:
            raise ConfigError(
                f"{machine.hardware.name} has no drive for states: name one (--nvme 1x-gen4), or "
                "leave state_on_drive out"
            )
        self._machine = machine
        joined = math.ceil(states.num_extents / MOST_EXTENTS)
        self._free = states.num_buffers
        if joined > 1:
            self._free = max(_LEAST_BUFFERS, self._free // joined)
        self._elements = joined * states.elements / max(1, states.num_extents)
        self._bytes_each = states.num_bytes / max(1, states.elements)
        self._reads, self._writes = (
            SerialLane(LANE, machine.network, machine.recording) for _ in range(2)
        )
        self._wanted: list[tuple[int, int, int, int, _Part]] = []
        self._order = itertools.count()
        self._is_reading = False
        self._num_asked = self._num_lent = 0
        self._writing: defaultdict[int, list[tuple[int, simpy.Event]]] = defaultdict(list)
        """Ends of the writes of each segment's tasks, with their steps."""
        machine.starved = self._starved = Starved()

    def submit(
        self, segment: int, name: str, step: int, work: HostPass, after: Sequence[simpy.Event],
        *, deadline: int,
    ) -> simpy.Event:  # fmt: skip
        """Queue a host task on a segment's states, and return the event of its end.

        Args:
            segment: Index of the segment.
            name: Of its spans in the host's lane.
            step: The step that it belongs to.
            work: What the host does.
            after: What must have happened before extents are asked for.
            deadline: The step that waits for it.
        """
        env = self._machine.env
        count = max(1, round(work.elements / self._elements))
        task = _Task(simpy.Event(env), simpy.Event(env), count, count)
        # Another block's writes of this step hold nothing up; the block's own are a step old.
        writing = self._writing[segment]
        before = [event for own, event in writing if own < step and event.callbacks is not None]
        writing[:] = [item for item in writing if item[1].callbacks is not None]
        writing.append((step, task.written))
        share = work * (1.0 / count)
        size = share.elements * self._bytes_each
        parts = [_Part(name, step, deadline, -segment, share, size, task) for _ in range(count)]
        waits = [event for event in (*after, *before) if event.callbacks is not None]
        if waits:
            simpy.AllOf(env, waits).callbacks.append(lambda _: self._ask(parts))
        else:
            self._ask(parts)
        return task.computed

    def _ask(self, parts: Sequence[_Part]) -> None:
        for part in parts:
            key = (part.deadline, part.step, part.rank, next(self._order))
            heapq.heappush(self._wanted, (*key, part))
        self._num_asked += len(parts)
        self._note()
        self._read_next()

    def _read_next(self) -> None:
        """Read the most urgent extent, if there is one, and a buffer for it."""
        if self._is_reading or not self._wanted or not self._free:
            return
        self._is_reading = True
        self._free -= 1
        part = heapq.heappop(self._wanted)[-1]
        read = self._machine.from_drives(part.num_bytes)
        self._reads.submit("read", part.step, read).callbacks.append(lambda _: self._lend(part))

    def _lend(self, part: _Part) -> None:
        """Let the host work on an extent that is there."""
        self._is_reading = False
        self._num_asked -= 1
        self._num_lent += 1
        self._note()
        machine = self._machine
        done = machine.host.submit(
            part.name, part.step, machine.host_work(part.work.num_bytes, part.work.steps),
            deadline=part.deadline, rank=part.rank,
        )  # fmt: skip
        done.callbacks.append(lambda _: self._take_back(part))
        self._read_next()

    def _take_back(self, part: _Part) -> None:
        """Write an extent behind its user's back."""
        self._num_lent -= 1
        self._note()
        part.task.num_left -= 1
        if not part.task.num_left:
            part.task.computed.succeed()
        write = self._machine.to_drives(part.num_bytes)
        written = self._writes.submit("write", part.step, write)
        written.callbacks.append(lambda _: self._release(part))

    def _release(self, part: _Part) -> None:
        part.task.num_unwritten -= 1
        if not part.task.num_unwritten:
            part.task.written.succeed()
        self._free += 1
        self._read_next()

    def _note(self) -> None:
        waits = self._num_asked > 0 and not self._num_lent
        self._starved.run(self._machine.env.now, is_running=waits)
