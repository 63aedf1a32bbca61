"""Lanes of a simulated machine: what runs one after another, and records its spans.

`SerialLane` is first in, first out, as a CUDA stream or a copy engine is: a job that waits holds
up those behind it. `HostLane` takes the ready task with the earliest deadline and lets a more
urgent one in between, as the engine's host worker does. No torch.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import simpy

from sim.fluid import Flow, FlowKind, FluidNetwork
from zenflow.trace.timeline import Span, Timeline

Row = tuple[str, str, float, float, int, float]
"""Lane, name, start, end, step, bytes of a span to be."""


@dataclass(slots=True)
class Recording:
    """What the lanes did, as rows: making them `Span`s waits until someone looks."""

    rows: list[Row] = field(default_factory=list)
    keeps: bool = True
    """Whether spans are kept; seconds and bytes by lane and step always are."""
    totals: dict[tuple[str, str, int], list[float]] = field(default_factory=dict)
    """Seconds of work and bytes by lane, name and step."""

    def add(self, lane: str, name: str, start: float, end: float, step: int, size: float) -> None:
        """Record what a lane did."""
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

    def busy_since(self, lane: str, step: int, name: str | None = None) -> float:
        """Return the seconds that a lane worked for steps after this one, at all or at a name."""
        return sum(
            total[0]
            for (on, what, of), total in self.totals.items()
            if on == lane and of > step and name in (None, what)
        )

    def bytes_since(self, lane: str, step: int) -> float:
        """Return the bytes that a lane moved for steps after this one."""
        return sum(t[1] for (on, _, of), t in self.totals.items() if on == lane and of > step)

    def timeline(self, metadata: dict[str, Any], after: int = 0) -> Timeline:
        """Return the spans of the steps after this one, in order of start."""
        rows = sorted((row for row in self.rows if row[4] > after), key=lambda row: row[2])
        spans = (Span(*row[:5], num_bytes=round(row[5])) for row in rows)
        return Timeline(tuple(spans), {"source": "simulated", **metadata})


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a job takes: seconds by itself, then bytes of a flow."""

    seconds: float = 0.0
    kind: FlowKind | None = None
    """None for work that shares nothing."""
    num_bytes: float = 0.0
    """Of the flow."""
    counted: float = 0.0
    """Bytes that its span says it moved: those of a copy, not what the copy costs elsewhere."""


class Done(simpy.Event):
    """The end of a job. One that nobody waits for yet passes without a turn of SimPy's queue."""

    def finish(self) -> None:
        """Let it happen now."""
        if self.callbacks:
            self.succeed()
        else:
            self._ok, self._value = True, None
            self.callbacks = None  # type: ignore[assignment] # SimPy's mark of what is past


@dataclass(slots=True, eq=False)
class _Job:
    name: str
    step: int
    work: Work
    done: Done
    after: list[simpy.Event]


class SerialLane:
    """First in, first out."""

    def __init__(
        self, name: str, env: simpy.Environment, network: FluidNetwork, recording: Recording
    ) -> None:
        """Start idle."""
        self.name = name
        self._env = env
        self._network = network
        self._recording = recording
        self._jobs: deque[_Job] = deque()
        self._running: _Job | None = None
        self._started = 0.0

    def submit(
        self, name: str, step: int, work: Work, after: Iterable[simpy.Event] = ()
    ) -> simpy.Event:
        """Queue a job and return the event of its end.

        Args:
            name: Of its span.
            step: The optimizer step that it belongs to.
            work: What it takes.
            after: What must have happened before it starts.
        """
        done = Done(self._env)
        self._jobs.append(_Job(name, step, work, done, [e for e in after if not e.processed]))
        if self._running is None and len(self._jobs) == 1:
            self._advance()
        return done

    def _advance(self, _: Any = None) -> None:
        """Start the first job if it can."""
        if self._running is not None or not self._jobs:
            return
        job = self._jobs[0]
        while job.after:
            event = job.after[-1]
            if not event.processed:
                event.callbacks.append(self._advance)
                return
            job.after.pop()
        self._jobs.popleft()
        self._running = job
        self._started = self._env.now
        work = job.work
        if work.seconds > 0 or work.kind is None:
            simpy.Timeout(self._env, work.seconds).callbacks.append(self._flow)
        else:
            self._flow()

    def _flow(self, _: Any = None) -> None:
        """Begin the job's flow, if it has one."""
        assert self._running is not None
        work = self._running.work
        if work.kind is None or work.num_bytes <= 0:
            self._end()
        else:
            self._network.send(work.kind, work.num_bytes, self._end)

    def _end(self) -> None:
        job, self._running = self._running, None
        assert job is not None
        self._recording.add(
            self.name, job.name, self._started, self._env.now, job.step, job.work.counted
        )
        job.done.finish()
        self._advance()


@dataclass(slots=True, order=True)
class _Task:
    deadline: int
    order: int
    name: str = field(compare=False)
    step: int = field(compare=False)
    work: Work = field(compare=False)
    done: Done = field(compare=False)
    awaited: int = field(compare=False)
    remaining: float = field(compare=False)
    began: bool = field(compare=False, default=False)


class HostLane:
    """Earliest deadline first among the tasks that are ready; a more urgent one interrupts.

    The engine's worker takes tasks in parts of a millisecond, so that waiting for the end of one
    is nothing: here a flow is stopped, and goes on later with the bytes it had left.
    """

    def __init__(
        self, name: str, env: simpy.Environment, network: FluidNetwork, recording: Recording
    ) -> None:
        """Start idle."""
        self.name = name
        self._env = env
        self._network = network
        self._recording = recording
        self._order = itertools.count()
        self._ready: list[_Task] = []
        self._running: _Task | None = None
        self._flow: Flow | None = None
        self._started = 0.0

    def submit(
        self,
        name: str,
        step: int,
        work: Work,
        after: Iterable[simpy.Event] = (),
        *,
        deadline: int = 0,
    ) -> simpy.Event:
        """Queue a task and return the event of its end; it starts once all of `after` happened."""
        waits = [event for event in after if not event.processed]
        done = Done(self._env)
        task = _Task(
            deadline, next(self._order), name, step, work, done, len(waits), work.num_bytes
        )
        for event in waits:
            event.callbacks.append(lambda _: self._arrived(task))
        if not waits:
            self._make_ready(task)
        return done

    def _arrived(self, task: _Task) -> None:
        task.awaited -= 1
        if not task.awaited:
            self._make_ready(task)

    def _make_ready(self, task: _Task) -> None:
        heapq.heappush(self._ready, task)
        running, flow = self._running, self._flow
        if running is None:
            self._advance()
        elif flow is not None and task.deadline < running.deadline:
            self._flow = None
            running.remaining = self._network.stop(flow)
            self._record(running, flow.num_bytes - running.remaining)
            if running.remaining > 0:
                heapq.heappush(self._ready, running)
            else:  # its end was due now
                running.done.finish()
            self._running = None
            self._advance()

    def _advance(self) -> None:
        if self._running is not None or not self._ready:
            return
        task = heapq.heappop(self._ready)
        self._running = task
        self._started = self._env.now
        work = task.work
        if not task.began and (work.seconds > 0 or work.kind is None):
            task.began = True
            simpy.Timeout(self._env, work.seconds).callbacks.append(self._begin_flow)
        else:
            self._begin_flow()

    def _begin_flow(self, _: Any = None) -> None:
        task = self._running
        assert task is not None
        if task.work.kind is None or task.remaining <= 0:
            self._end()
            return
        self._flow = self._network.send(task.work.kind, task.remaining, self._end)

    def _end(self) -> None:
        task, self._running, self._flow = self._running, None, None
        assert task is not None
        self._record(task, task.remaining)
        task.done.finish()
        self._advance()

    def _record(self, task: _Task, moved: float) -> None:
        share = moved / task.work.num_bytes if task.work.num_bytes else 1.0
        self._recording.add(
            self.name, task.name, self._started, self._env.now, task.step,
            task.work.counted * share,
        )  # fmt: skip
