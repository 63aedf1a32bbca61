"""Tape: jobs and waits of a schedule, recorded without simulating it.

Jobs, their order and waits follow from blocks, windows and memory. The machine's speed decides
only when each happens. So a schedule is recorded once, on a machine that takes no time, and
replayed on as many machines as there are. Seconds are sums of times of the machine, such as a
layer's forward: see `times_of`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from sim.timing.costs import StepCosts
from zenflow.errors import ZenFlowError

LANES = ("device", "d2h", "h2d", "host", "launch")
"""Lanes of a tape, by their number in it."""
WORKS = ("forward", "backward", "step", "d2h", "h2d", "host", "launch")
"""Kinds of work, by their number on a tape: those of the device by name, others by lane."""
_DEVICE = 0


class CannotRecordError(ZenFlowError):
    """The schedule does something that no tape can hold: it must be simulated."""


class Seconds(dict[int, float]):
    """A sum of times of the machine: how often each is taken, by its place in `times_of`.

    Raises:
        CannotRecordError: Seconds are added that no machine has.
    """

    __slots__ = ()

    def __add__(self, other: Seconds | float) -> Seconds:
        if not isinstance(other, Seconds):
            if other:
                raise CannotRecordError("seconds are added that no machine has")
            return self
        total = Seconds(self)
        for place, count in other.items():
            total[place] = total.get(place, 0.0) + count
        return total

    __radd__ = __add__

    def __rmul__(self, count: float) -> Seconds:
        return Seconds({place: count * own for place, own in self.items()})


class Event:
    """The end of a job, or of a sleep."""

    sleep: Any = 0.0
    """Seconds of a sleep."""
    processed = False
    """Whether the event is over on every machine, as the schedule has waited for it."""
    callbacks: tuple[Any, ...] | None = ()
    is_on_device = False

    def __init__(self, job: int) -> None:
        self.job = job
        """Number of the job on the tape; -1 for a sleep."""


PER_UNIT = (
    "pack_bandwidth", "unpack_bandwidth", "intake_bandwidth", "device_update", "column_update",
)  # fmt: skip
"""Rates of the engine's parts, of which one over each is a time."""
TIMES = ("copy", "step", "host_task", "select", "bucket")
"""Seconds of the engine's parts."""
OTHERS = (*PER_UNIT, *TIMES, "elementwise", "latency", "launching")
"""Times of `times_of` behind those of segments; "elementwise" is one over a rate, too."""


def times_of(costs: StepCosts) -> list[float]:
    """Return a machine's seconds for one unit of everything that a tape counts.

    Forward of each segment, backward of each, and `OTHERS`: of rates the seconds of one unit.
    """
    hardware = costs.hardware
    rates = {name: getattr(hardware.overheads, name) for name in PER_UNIT}
    rates["unpack_bandwidth"] = rates["unpack_bandwidth"] or rates["pack_bandwidth"]
    rates["column_update"] = rates["column_update"] or rates["device_update"]
    others = {
        **{name: 1.0 / quantity.value for name, quantity in rates.items()},
        **{name: getattr(hardware.overheads, name).value for name in TIMES},
        "elementwise": 1.0 / costs.elementwise_bandwidth,
        "latency": hardware.link.latency.value,
        "launching": costs.launching_seconds,
    }
    segments = costs.segments
    passes = [*(s.forward for s in segments), *(s.backward for s in segments)]
    return [*passes, *(others[name] for name in OTHERS)]


JOB = (
    "lane", "work", "seconds", "num_bytes", "steps", "counted", "step", "deadline", "rank",
    "num_after",
)  # fmt: skip
"""Numbers of a job. Its seconds are a number on the tape; steps count from the submitting one."""
OPERATION = ("awaited", "sleep", "submitted")
"""Numbers of a wait of the schedule itself: for a job, by how many were submitted since, or 0; for
seconds, by their number; and the number of the step's jobs that are submitted before."""
GAP = ("passed", "num_room")
"""Numbers of a wait of backward for room in the ring, from the end of a job on, which is counted
from the step's first one."""
STEP = ("num_jobs", "num_operations", "num_gaps", "stall_begin")
"""Numbers of a step: of its jobs, operations and gaps, and of the operation at which the device
begins to wait."""


class Tape:
    """Recorded steps of a schedule, with relative references: equal steps are equal.

    Attributes:
        jobs: Rows of `JOB`.
        after: What each job waits for, by how many were submitted since.
        operations: Rows of `OPERATION`.
        gaps: Rows of `GAP`.
        rooms: Ends of jobs that make room for each gap, counted from the step's first one.
        steps: Rows of `STEP`, of the steps that have ended.
        seconds: Sums by their number; the first is empty.
        number: Number of the step under way, from 1.
        num_jobs: Number of jobs of all steps so far.
        num_operations: Number of waits of all steps so far.
    """

    def __init__(self) -> None:
        """Start with the first step."""
        self.jobs = array("d")
        self.after, self.operations = array("q"), array("q")
        self.gaps, self.rooms, self.steps = array("q"), array("q"), array("q")
        self.seconds = [Seconds()]
        self.number = 1
        self.num_jobs = self.num_operations = 0
        self._numbers: dict[int, int] = {}
        """Number of each sum, by its identity: schedules hand the same ones on."""
        self._first_job = self._first_operation = self._num_gaps = 0
        self._on_device: list[Event] = []
        """Ends of the device's work that may not be over, in order."""

    def submit(
        self, lane: int, work: int, seconds: Any, num_bytes: float, steps: float, counted: float,
        step: int, deadline: int, rank: int, after: Iterable[Any],
    ) -> Event:  # fmt: skip
        """Append a job; return the event of its end."""
        place, now = self.num_jobs, self.number
        number = self._numbers.get(id(seconds)) or self._number(seconds)
        behind = [place - event.job for event in after if not event.processed] if after else ()
        if behind:
            self.after.extend(behind)
        self.jobs.extend((
            lane, work, number, num_bytes, steps, counted, step - now, deadline - now, rank,
            len(behind),
        ))  # fmt: skip
        self.num_jobs = place + 1
        done = Event(place)
        if lane == _DEVICE:
            done.is_on_device = True
            self._on_device.append(done)
        return done

    def wait(self, event: Any) -> None:
        """Append a wait of the schedule.

        Raises:
            CannotRecordError: It is for something else than a job's end or seconds.
        """
        if not isinstance(event, Event):
            raise CannotRecordError(f"it waits for {event!r}")
        awaited = self.num_jobs - event.job if event.job >= 0 else 0
        submitted = self.num_jobs - self._first_job
        self.operations.extend((awaited, self._number(event.sleep), submitted))
        self.num_operations += 1
        event.processed, event.callbacks = True, None  # what follows comes behind it
        if event.is_on_device:  # its work is done in turn
            over = [own for own in self._on_device if own.job <= event.job]
            for own in over:
                own.processed, own.callbacks = True, None
            del self._on_device[: len(over)]

    def watch(self, passed: Event, room: Sequence[Event]) -> None:
        """Append a wait of backward."""
        first = self._first_job
        self.rooms.extend([event.job - first for event in room])
        self.gaps.extend((passed.job - first, len(room)))
        self._num_gaps += 1

    def end(self, last: int, stall_begin: int, has_gaps: bool) -> None:
        """End a step; what is submitted next is of the next one.

        Args:
            last: Number of waits before the one with which it ends.
            stall_begin: Number of those before the one with which the device begins to wait.
            has_gaps: Whether waits of backward are stall, too.

        Raises:
            CannotRecordError: Any of them is another step's.
        """
        first = self._first_operation
        is_own = last == self.num_operations - 1 and stall_begin >= first
        if not is_own or has_gaps != (self._num_gaps > 0):
            raise CannotRecordError("a step's stall has another step's waits in it")
        self.steps.extend((
            self.num_jobs - self._first_job, self.num_operations - first, self._num_gaps,
            stall_begin - first,
        ))  # fmt: skip
        self.number += 1
        self._first_job, self._first_operation = self.num_jobs, self.num_operations
        self._num_gaps = 0

    def _number(self, seconds: Any) -> int:
        """Return the number of a sum, or 0 for no seconds.

        Raises:
            CannotRecordError: They are no times of the machine.
        """
        if not isinstance(seconds, Seconds):
            if seconds:
                raise CannotRecordError("a job takes seconds that no machine has")
            return 0
        found = self._numbers.get(id(seconds))
        if found is None:
            found = self._numbers[id(seconds)] = len(self.seconds)
            self.seconds.append(seconds)
        return found
