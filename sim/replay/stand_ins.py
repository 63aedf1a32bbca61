"""Stand-ins: a machine, costs and a clock with which a schedule can run without any time.

A moment and a number of seconds are sums whose terms get their values when a tape is replayed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sim.fluid import FlowKind
from sim.lanes import Work
from sim.machine import Machine
from sim.replay.tape import LANES, OTHERS, PER_UNIT, TIMES, CannotRecordError, Gap, Job, Seconds
from sim.schedules.schedule import Waits
from sim.schedules.zenflow import EngineSchedule
from sim.timing.block_plan import PlannedBlock
from sim.timing.costs import StepCosts


class Sum:
    """A sum of moments and gaps, which have no value while a schedule is recorded."""

    def __init__(self, terms: dict[Any, float]) -> None:
        self.terms = terms

    def __add__(self, other: Sum | float) -> Sum:
        return self._with(other, 1.0)

    __radd__ = __add__

    def __sub__(self, other: Sum | float) -> Sum:
        return self._with(other, -1.0)

    def _with(self, other: Sum | float, sign: float) -> Sum:
        if not isinstance(other, Sum):
            if other:
                raise CannotRecordError("a moment is moved by seconds")
            return self
        terms = dict(self.terms)
        for key, factor in other.terms.items():
            terms[key] = terms.get(key, 0.0) + sign * factor
        return Sum({key: factor for key, factor in terms.items() if factor})


class SecondsSum:
    """A sum of times of the machine, by their places."""

    __slots__ = ("times",)

    def __init__(self, times: dict[int, float]) -> None:
        self.times = times

    def __add__(self, other: SecondsSum | float) -> SecondsSum:
        if not isinstance(other, SecondsSum):
            if other:
                raise CannotRecordError("seconds are added that no machine has")
            return self
        times = dict(self.times)
        for place, count in other.times.items():
            times[place] = times.get(place, 0.0) + count
        return SecondsSum(times)

    __radd__ = __add__

    def __rmul__(self, count: float) -> SecondsSum:
        return SecondsSum({place: count * own for place, own in self.times.items()})


class _Rate:
    """A rate of the machine, whose time of one unit has this place."""

    def __init__(self, place: int) -> None:
        self._place = place

    def __rtruediv__(self, count: float) -> SecondsSum:
        return SecondsSum({self._place: count})


@dataclass(frozen=True, slots=True)
class _Figure:
    """A quantity whose value is known when the tape is replayed."""

    value: Any


class _Instead:
    """An object with other values for some attributes."""

    def __init__(self, usual: Any, others: dict[str, Any]) -> None:
        self._usual = usual
        self.__dict__.update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._usual, name)


def _other(costs: StepCosts, name: str) -> Any:
    """Return one of `OTHERS` in place of its value."""
    place = 2 * len(costs.segments) + OTHERS.index(name)
    return _Rate(place) if name in (*PER_UNIT, "elementwise") else SecondsSum({place: 1.0})


class TapeCosts(_Instead):
    """Costs whose seconds are known when the tape is replayed."""

    def __init__(self, costs: StepCosts) -> None:
        count = len(costs.segments)
        segments = [
            replace(
                segment,
                forward=SecondsSum({index: 1.0}),  # type: ignore[arg-type]
                backward=SecondsSum({count + index: 1.0}),  # type: ignore[arg-type]
            )
            for index, segment in enumerate(costs.segments)
        ]
        others = {"elementwise_bandwidth": _other(costs, "elementwise"), "segments": segments}
        super().__init__(costs, {**others, "num_params": costs.num_params})


@dataclass(slots=True, eq=False)
class Event:
    """The end of a job, or of a sleep."""

    job: int | None = None
    sleep: Any = 0.0
    processed: bool = False
    callbacks: tuple[Any, ...] = ()


@dataclass(slots=True)
class Tape:
    """What is recorded, with operations and gaps by jobs' places on the whole tape."""

    jobs: list[Job] = field(default_factory=list)
    operations: list[tuple[Event, int]] = field(default_factory=list)
    """What is waited for, and the number of jobs submitted before."""
    gaps: list[Gap] = field(default_factory=list)

    def add(self, job: Job) -> Event:
        """Append a job; return the event of its end."""
        self.jobs.append(job)
        return Event(job=len(self.jobs) - 1)

    def wait(self, event: Any) -> None:
        """Append a wait of the schedule.

        Raises:
            CannotRecordError: It is for something else than a job's end or seconds.
        """
        if not isinstance(event, Event):
            raise CannotRecordError(f"it waits for {event!r}")
        self.operations.append((event, len(self.jobs)))


class _TapeEnvironment:
    """A clock that shows moments."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape

    @property
    def now(self) -> Sum:
        """The present: the end of the last operation."""
        return Sum({len(self._tape.operations) - 1: 1.0})

    def timeout(self, delay: Any) -> Event:
        return Event(sleep=delay)


class _TapeLane:
    """A lane that only records."""

    def __init__(self, tape: Tape, lane: int) -> None:
        self._tape = tape
        self._lane = lane

    def submit(
        self,
        name: str,
        step: int,
        work: Work,
        after: Iterable[Any] = (),
        *,
        deadline: int = 0,
        rank: int = 0,
    ) -> Event:
        del name
        return self._tape.add(self._job(step, work, after, deadline, rank, is_awaited=True))

    def submit_all(self, name: str, step: int, works: Sequence[Work]) -> Event:
        for work in works[:-1]:
            self._tape.add(self._job(step, work, (), 0, 0, is_awaited=False))
        return self.submit(name, step, works[-1])

    def _job(
        self, step: int, work: Work, after: Iterable[Any], deadline: int, rank: int, *,
        is_awaited: bool,
    ) -> Job:  # fmt: skip
        place = len(self._tape.jobs)
        behind = tuple([place - event.job for event in after])
        return Job(
            lane=self._lane,
            is_awaited=is_awaited,
            seconds=seconds_of(work.seconds),
            num_bytes=work.num_bytes,
            steps=work.steps if isinstance(work, _HostWork) else 0.0,
            counted=work.counted,
            step=step,
            deadline=deadline or step,  # only the host goes by it
            rank=rank,
            after=behind,
        )


def seconds_of(seconds: Any) -> Seconds:
    """Return seconds as a tape has them.

    Raises:
        CannotRecordError: They are a number.
    """
    if isinstance(seconds, SecondsSum):
        return tuple(seconds.times.items())
    if seconds:
        raise CannotRecordError("a job takes seconds that no machine has")
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _HostWork(Work):
    """Work of the host, whose rate its arithmetic may bound."""

    steps: float = 0.0


class TapeMachine(Machine):
    """A machine whose lanes record."""

    def __init__(self, costs: StepCosts) -> None:
        super().__init__(costs.hardware, keeps_spans=False)
        self.tape = Tape()
        self.env: Any = _TapeEnvironment(self.tape)
        for number, name in enumerate(LANES):
            setattr(self, name, _TapeLane(self.tape, number))
        self.fabric = self.nvme_read = self.nvme_write = None  # type: ignore[assignment]
        hardware = costs.hardware
        figures = {name: _Figure(_other(costs, name)) for name in (*PER_UNIT, *TIMES)}
        latency = {"latency": _Figure(_other(costs, "latency"))}
        self.hardware: Any = _Instead(
            hardware,
            {
                "overheads": _Instead(hardware.overheads, figures),
                "link": _Instead(hardware.link, latency),
            },
        )
        self.pack_rate = figures["pack_bandwidth"].value
        self.unpack_rate = figures["unpack_bandwidth"].value

    def host_work(
        self, num_bytes: float, steps: float = 0.0, kind: FlowKind | None = None
    ) -> Work:
        """Return a host task with its AdamW steps: how fast it is depends on the machine.

        Raises:
            CannotRecordError: It is of another kind than the AdamW kernel.
        """
        if kind is not None:
            raise CannotRecordError(f"a host task is {kind.name}, and no kernel of AdamW's")
        seconds = self.hardware.overheads.host_task.value
        return _HostWork(seconds=seconds, kind=self.host_kind, num_bytes=num_bytes, steps=steps)


class _TapeWaits(Waits):
    """Stalls that are gaps."""

    seconds: Any

    def watch(self, passed: Any, causes: Sequence[Any], step: int) -> None:
        del step
        tape = self._machine.tape  # type: ignore[attr-defined]
        for _, events in causes:
            if events:
                tape.gaps.append(Gap(passed.job, tuple(event.job for event in events)))
                self.seconds = self.seconds + Sum({("gap", len(tape.gaps) - 1): 1.0})


class TapedSchedule(EngineSchedule):
    """The engine's schedule, on such a machine."""

    _waits_type = _TapeWaits
    selects_in = 0
    """Step that asks for a selection, whatever the configuration says."""

    def _begin(self, step: int) -> list[PlannedBlock]:
        if step == self.selects_in:
            self._wants_selection = [True] * len(self._wants_selection)
        return super()._begin(step)
