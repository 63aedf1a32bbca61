"""Lanes of a simulated machine: queues whose jobs run one after another, and record their spans.

`SerialLane` is first in, first out, as a CUDA stream or a copy engine is: a job that waits holds
up those behind it. `HostLane` takes the ready task with the earliest deadline and lets a more
urgent one in between, as the engine's host worker does.
"""

from __future__ import annotations

import heapq
import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import simpy

from sim.fluid import Alarm, Flow, FlowKind, FluidNetwork
from zenflow.trace.timeline import Span, Timeline

SpanRow = tuple[str, str, float, float, int, float]
"""Lane, name, start, end, step and bytes: a span before it is made."""


@dataclass(slots=True)
class Recording:
    """Work of the lanes as rows; `Span`s are made of them only where somebody looks."""

    rows: list[SpanRow] = field(default_factory=list)
    keeps: bool = True
    """Whether spans are kept; seconds and bytes by lane and step always are."""
    totals: dict[tuple[str, str, int], list[float]] = field(default_factory=dict)
    """Seconds of work and bytes by lane, name and step."""

    def add(self, lane: str, name: str, start: float, end: float, step: int, size: float) -> None:
        """Record a piece of a lane's work."""
        total = self.totals.get((lane, name, step))
        if total is None:
            self.totals[lane, name, step] = [end - start, size]
        else:
            total[0] += end - start
            total[1] += size
        if self.keeps:
            self.rows.append((lane, name, start, end, step, size))

    def add_stall(self, cause: str, start: float, end: float, step: int) -> None:
        """Record that the device waited."""
        if self.keeps and end > start:
            self.rows.append(("device", f"stall:{cause}", start, end, step, 0))

    @property
    def lanes(self) -> tuple[str, ...]:
        """Lanes that did anything, in order of their first work."""
        return tuple(dict.fromkeys(lane for lane, *_ in self.totals))

    def since(self, step: int, lane: str, name: str | None = None) -> tuple[float, float]:
        """Return a lane's seconds and bytes for steps after this one, in all or under a name."""
        found = [
            total
            for (on, what, of), total in self.totals.items()
            if on == lane and of > step and name in (None, what)
        ]
        return sum(seconds for seconds, _ in found), sum(size for _, size in found)

    def timeline(self, metadata: dict[str, Any], after: int = 0) -> Timeline:
        """Return the spans of the steps after this one, in order of start."""
        rows = sorted((row for row in self.rows if row[4] > after), key=lambda row: row[2])
        spans = (Span(*row[:5], num_bytes=round(row[5])) for row in rows)
        return Timeline(tuple(spans), {"source": "simulated", **metadata})


@dataclass(slots=True, kw_only=True)  # many are made, and frozen ones take twice as long
class Work:
    """Costs of a job: seconds by itself, then bytes of a flow."""

    seconds: float = 0.0
    """Seconds before the flow."""
    kind: FlowKind | None = None
    """Kind of its flow; None for work that shares nothing."""
    num_bytes: float = 0.0
    """Bytes of its flow."""
    counted: float = 0.0
    """Bytes that its span shows as moved: a copy's own, not its cost elsewhere."""


@dataclass(slots=True, eq=False)
class _LaneJob:
    """Work in a lane's queue."""

    name: str
    step: int
    work: Work
    done: simpy.Event | None
    """Event of its end; None if nobody asked for it."""
    after: list[simpy.Event]
    """Events that it still waits for."""
    deadline: int
    rank: int
    order: int
    """Number of jobs queued before it."""
    remaining: float
    """Bytes of its flow that are left to move."""
    has_begun: bool = False
    """Whether its own seconds are over or running, so that only bytes are left."""


@dataclass(eq=False)
class AbstractLane(ABC):
    """A queue that runs one job at a time: its own seconds first, then its flow."""

    name: str
    network: FluidNetwork
    """Flows of the machine, on whose clock the lane works."""
    recording: Recording
    """Spans of the machine."""
    _order: Iterator[int] = field(default_factory=itertools.count)
    _running: _LaneJob | None = None
    _flow: Flow | None = None
    _started: float = 0.0

    def __post_init__(self) -> None:
        """Take the clock, and make the alarm for the end of a job's own seconds."""
        self._env = self.network.env
        self._alarm = Alarm(self._env, self._begin_flow)

    def submit(
        self,
        name: str,
        step: int,
        work: Work,
        after: Iterable[simpy.Event] = (),
        *,
        deadline: int = 0,
        rank: int = 0,
    ) -> simpy.Event:
        """Queue a job and return the event of its end.

        Args:
            name: Of its span.
            step: The optimizer step that it belongs to.
            work: What it takes.
            after: What must have happened before it starts.
            deadline: How urgent it is in a lane that goes by that: the step that waits for it.
            rank: Its place among a step's jobs of the same deadline, in such a lane.
        """
        done = simpy.Event(self._env)
        self._submit(name, step, work, done, after, deadline, rank)
        return done

    def submit_all(self, name: str, step: int, works: Sequence[Work]) -> simpy.Event:
        """Queue jobs of one name, at least one; return the event of the end of the last.

        An event for each end that nobody waits for would take as long as the job itself.
        """
        for work in works[:-1]:
            self._submit(name, step, work, None, (), 0, 0)
        return self.submit(name, step, works[-1])

    def _submit(
        self,
        name: str,
        step: int,
        work: Work,
        done: simpy.Event | None,
        after: Iterable[simpy.Event],
        deadline: int,
        rank: int,
    ) -> None:
        waits = [event for event in after if event.callbacks is not None]  # not yet processed
        order = next(self._order)
        self._queue(_LaneJob(name, step, work, done, waits, deadline, rank, order, work.num_bytes))

    @abstractmethod
    def _queue(self, job: _LaneJob) -> None:
        """Take a job in, and start it if it can be."""

    @abstractmethod
    def _advance(self) -> None:
        """Start the next job if the lane is idle and one is ready."""

    def _start(self, job: _LaneJob) -> None:
        self._running = job
        self._started = self._env.now
        work = job.work
        if not job.has_begun and (work.seconds > 0 or work.kind is None):
            job.has_begun = True
            self._alarm.set(work.seconds)
        else:
            self._begin_flow()

    def _begin_flow(self, _: Any = None) -> None:
        """Begin the job's flow, if it has one."""
        job = self._running
        assert job is not None
        kind = job.work.kind
        if kind is None or job.remaining <= 0:
            self._end()
        else:
            self._flow = self.network.send(kind, job.remaining, self._end)

    def _end(self) -> None:
        job, self._running, self._flow = self._running, None, None
        assert job is not None
        self._record(job, job.remaining)
        if job.done is not None:
            job.done.succeed()
        self._advance()

    def _record(self, job: _LaneJob, moved: float) -> None:
        """Record the job's span, in which so many bytes of its flow moved."""
        work, now = job.work, self._env.now
        counted = work.counted
        if counted and work.num_bytes:
            counted *= moved / work.num_bytes
        self.recording.add(self.name, job.name, self._started, now, job.step, counted)


@dataclass(eq=False)
class SerialLane(AbstractLane):
    """Queue that is first in, first out, as a CUDA stream is.

    Examples:
        A copy that waits for nothing still stands behind the one before it.

        >>> env = simpy.Environment()
        >>> recording = Recording()
        >>> lane = SerialLane("d2h", FluidNetwork(env), recording)
        >>> event = env.timeout(3.0)
        >>> _ = lane.submit("late", 1, Work(seconds=1.0), after=[event])
        >>> _ = lane.submit("next", 1, Work(seconds=1.0))
        >>> env.run()
        >>> [row[1:4] for row in recording.rows]
        [('late', 3.0, 4.0), ('next', 4.0, 5.0)]
    """

    _jobs: deque[_LaneJob] = field(default_factory=deque)

    def _queue(self, job: _LaneJob) -> None:
        self._jobs.append(job)
        if len(self._jobs) == 1:
            self._advance()

    def _advance(self, _: Any = None) -> None:
        """Start the first job, or wait for one of the events that it still waits for."""
        if self._running is not None or not self._jobs:
            return
        job = self._jobs[0]
        while job.after:
            event = job.after[-1]
            if not event.processed:
                event.callbacks.append(self._advance)
                return
            job.after.pop()
        self._start(self._jobs.popleft())


@dataclass(eq=False)
class HostLane(AbstractLane):
    """Earliest deadline first among the jobs that are ready; a more urgent one interrupts.

    The engine's worker takes tasks in parts of a millisecond, so that waiting for the end of one
    is nothing: here a flow is stopped, and goes on later with the bytes it had left.

    Examples:
        The task whose weights are needed in step 2 goes before the one that step 5 needs.

        >>> env = simpy.Environment()
        >>> recording = Recording()
        >>> lane = HostLane("host", FluidNetwork(env), recording)
        >>> for name, deadline in (("running", 9), ("can wait", 5), ("urgent", 2)):
        ...     _ = lane.submit(name, 1, Work(seconds=1.0), deadline=deadline)
        >>> env.run()
        >>> [row[1] for row in recording.rows]
        ['running', 'urgent', 'can wait']
    """

    _ready: list[tuple[int, int, int, int, _LaneJob]] = field(default_factory=list)

    def _queue(self, job: _LaneJob) -> None:
        waits = len(job.after)

        def arrive(_: Any) -> None:
            nonlocal waits
            waits -= 1
            if not waits:
                self._make_ready(job)

        for event in job.after:
            event.callbacks.append(arrive)
        if not waits:
            self._make_ready(job)

    def _make_ready(self, job: _LaneJob) -> None:
        self._push(job)
        running, flow = self._running, self._flow
        if running is None:
            self._advance()
        elif flow is not None and job.deadline < running.deadline:
            self._interrupt(running, flow)

    def _push(self, job: _LaneJob) -> None:
        heapq.heappush(self._ready, (job.deadline, job.step, job.rank, job.order, job))

    def _interrupt(self, running: _LaneJob, flow: Flow) -> None:
        """Stop the running job's flow, and start the most urgent job."""
        self._running = self._flow = None
        running.remaining = self.network.stop(flow)
        self._record(running, flow.num_bytes - running.remaining)
        if running.remaining > 0:
            self._push(running)
        elif running.done is not None:  # its end was due now
            running.done.succeed()
        self._advance()

    def _advance(self) -> None:
        if self._running is None and self._ready:
            self._start(heapq.heappop(self._ready)[-1])
