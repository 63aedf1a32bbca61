"""Arrays: the steps of a tape one after another, as the C code reads them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.replay.library import CTape, replay_library
from sim.replay.tape import LANES, Job, Seconds, Step
from zenflow.errors import ZenFlowError

Array = NDArray[np.float64]
_JOB = (
    ("lane", np.int8), ("is_awaited", np.int8), ("num_bytes", np.float64), ("steps", np.float64),
    ("counted", np.float64), ("step", np.int32), ("deadline", np.int32), ("rank", np.int32),
)  # fmt: skip
"""Numbers of a `Job` and their types, in order."""
RATES = ("d2h", "h2d", "duplex", "dram", "sharing", "host_sharing", "host", "steps")
"""Fields of `Rates` that a tape is replayed with, in the order of the C code."""


@dataclass(slots=True, eq=False)
class Sums:
    """Sums of a machine's times, one for each of M jobs or sleeps."""

    counts: NDArray[np.int64]
    """Number of each one's terms, (M,)."""
    places: NDArray[np.int64]
    """Places of all terms in `times_of`."""
    factors: Array
    """How often each of them is taken."""

    @classmethod
    def of(cls, seconds: Sequence[Seconds]) -> Sums:
        """Return recorded seconds as arrays."""
        return cls(
            np.array([len(own) for own in seconds], np.int64),
            np.array([place for own in seconds for place, _ in own], np.int64),
            np.array([factor for own in seconds for _, factor in own], np.float64),
        )

    @classmethod
    def joined(cls, sums: Sequence[Sums]) -> Sums:
        """Return all of these, one after another."""
        return cls(
            np.concatenate([own.counts for own in sums]),
            np.concatenate([own.places for own in sums]),
            np.concatenate([own.factors for own in sums]),
        )

    def first(self, count: int) -> Sums:
        """Return the first ones."""
        terms = self.counts[:count].sum()
        return Sums(self.counts[:count], self.places[:terms], self.factors[:terms])

    def at(self, times: Array) -> Array:
        """Return the seconds on N machines, (N, M), by their times, (N, P)."""
        found = np.zeros((len(times), len(self.counts)))
        owner = np.repeat(np.arange(len(self.counts)), self.counts)
        for index, machine in enumerate(times):
            weights = machine[self.places] * self.factors
            found[index] = np.bincount(owner, weights=weights, minlength=len(self.counts))
        return found


@dataclass(slots=True, eq=False)
class StepArrays:
    """One step as arrays, with relative references."""

    jobs: dict[str, NDArray[Any]]
    seconds: Sums
    after: NDArray[np.int64]
    after_counts: NDArray[np.int64]
    awaited: NDArray[np.int64]
    """Number of jobs since the awaited one; 0 for a sleep."""
    sleep: Sums
    submitted: NDArray[np.int64]
    stall_begin: int
    passed: NDArray[np.int64]
    room: NDArray[np.int64]
    room_counts: NDArray[np.int64]

    @classmethod
    def of(cls, step: Step) -> StepArrays:
        """Return a recorded step's arrays."""
        columns = dict(zip(Job._fields, zip(*step.jobs, strict=True), strict=True))
        after = columns["after"]
        return cls(
            jobs={name: np.array(columns[name], dtype) for name, dtype in _JOB},
            seconds=Sums.of(columns["seconds"]),
            after=np.array([place for own in after for place in own], np.int64),
            after_counts=np.array([len(own) for own in after], np.int64),
            awaited=np.array([own.awaited or 0 for own in step.operations], np.int64),
            sleep=Sums.of([own.sleep for own in step.operations]),
            submitted=np.array([own.submitted for own in step.operations], np.int64),
            stall_begin=step.stall_begin,
            passed=np.array([gap.passed for gap in step.gaps], np.int64),
            room=np.array([place for gap in step.gaps for place in gap.room], np.int64),
            room_counts=np.array([len(gap.room) for gap in step.gaps], np.int64),
        )

    def moved(self, steps: int) -> StepArrays:
        """Return the same, so many steps later."""
        jobs = {
            **self.jobs,
            "step": self.jobs["step"] + steps,
            "deadline": self.jobs["deadline"] + steps,
        }
        others = (
            self.seconds, self.after, self.after_counts, self.awaited, self.sleep, self.submitted,
            self.stall_begin, self.passed, self.room, self.room_counts,
        )  # fmt: skip
        return StepArrays(jobs, *others)

    def begun(self) -> StepArrays:
        """Return what the step before leaves to it: jobs of that step, and no waits."""
        count = int(np.argmax(self.jobs["step"] == self.jobs["step"].max()))
        none = np.empty(0, np.int64)
        return StepArrays(
            jobs={name: column[:count] for name, column in self.jobs.items()},
            seconds=self.seconds.first(count),
            after=self.after[: self.after_counts[:count].sum()],
            after_counts=self.after_counts[:count],
            awaited=none, sleep=Sums.of([]), submitted=none, stall_begin=0, passed=none, room=none,
            room_counts=none,
        )  # fmt: skip

    def counted(self, lane: int) -> float:
        """Return the bytes that a lane of copies moves for the step's jobs."""
        return float(self.jobs["counted"][self.jobs["lane"] == lane].sum())


@dataclass(frozen=True, slots=True)
class Replayed:
    """What N machines did."""

    ends: Array
    """Seconds at which each of T steps ended, (N, T)."""
    stalls: Array
    """Seconds of each step in which the device waited, (N, T)."""
    busy: Array
    """Seconds of work of each lane in the steps behind those that settle, (N, lanes)."""


class TapeArrays:
    """Steps in a row, ready to be replayed."""

    def __init__(
        self, steps: Sequence[StepArrays], settling: int, rest: StepArrays | None = None
    ) -> None:
        """Join the steps.

        Args:
            steps: All of them from the first.
            settling: Number of them whose work is not counted.
            rest: Step behind the last one: what is left to it is done as well.
        """
        num_steps = len(steps)
        steps = [*steps, *([rest.begun()] if rest else [])]
        counts = np.array([len(step.jobs["lane"]) for step in steps])
        begins = np.concatenate([[0], np.cumsum(counts)])
        operations = np.array([len(step.awaited) for step in steps])
        firsts = np.concatenate([[0], np.cumsum(operations)])
        gaps = np.array([len(step.passed) for step in steps])
        jobs = {name: np.concatenate([s.jobs[name] for s in steps]) for name, _ in _JOB}
        after_counts = np.concatenate([step.after_counts for step in steps])
        behind = np.repeat(np.arange(begins[-1]), after_counts)
        submitted = np.concatenate([s.submitted for s in steps]) + np.repeat(
            begins[:-1], operations
        )
        awaited = np.concatenate([step.awaited for step in steps])
        room_counts = np.concatenate([step.room_counts for step in steps])
        rooms = [len(step.room) for step in steps]
        arrays: dict[str, NDArray[Any]] = {
            **jobs,
            "after_at": np.concatenate([[0], np.cumsum(after_counts)]).astype(np.int64),
            "after": (behind - np.concatenate([s.after for s in steps])).astype(np.int32),
            "awaited": np.where(awaited > 0, submitted - awaited, -1).astype(np.int32),
            "submitted": submitted.astype(np.int32),
            "step_end": (firsts[1:] - 1).astype(np.int32),
            "stall_begin": (firsts[:-1] + [s.stall_begin for s in steps]).astype(np.int32),
            "gap_at": np.concatenate([[0], np.cumsum(gaps)]).astype(np.int32),
            "passed": (np.concatenate([s.passed for s in steps]) + np.repeat(begins[:-1], gaps))
            .astype(np.int32),
            "room_at": np.concatenate([[0], np.cumsum(room_counts)]).astype(np.int64),
            "room": (np.concatenate([s.room for s in steps]) + np.repeat(begins[:-1], rooms))
            .astype(np.int32),
        }  # fmt: skip
        self._num_steps = num_steps
        self._seconds = Sums.joined([step.seconds for step in steps])
        self._sleep = Sums.joined([step.sleep for step in steps])
        self._arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        self._tape = CTape(
            num_jobs=int(begins[-1]),
            num_operations=int(firsts[-1]),
            num_steps=num_steps,
            settling=settling,
            **{
                name: array.ctypes.data
                for name, array in self._arrays.items()
                if name != "counted"
            },
        )

    def replay(self, rates: Array, times: Array) -> Replayed:
        """Replay the steps on N machines.

        Args:
            rates: `RATES` of each machine, (N, 7).
            times: `times_of` each, (N, P), or of all of them, (1, P).

        Raises:
            ZenFlowError: The library is not built, memory is short, or a step never ends.
        """
        library = replay_library()
        if library is None:
            raise ZenFlowError("the replay is not built: simulate with sim.simulate")
        rates = np.ascontiguousarray(rates, np.float64)
        seconds, sleeps = self._seconds.at(times), self._sleep.at(times)
        count = len(rates)
        ends, stalls = np.empty((2, count, self._num_steps))
        busy = np.empty((count, len(LANES)))
        failed = library.sim_replay(
            ctypes.byref(self._tape), rates.ctypes.data, seconds.ctypes.data, sleeps.ctypes.data,
            len(times) > 1, count, ends.ctypes.data, stalls.ctypes.data, busy.ctypes.data,
        )  # fmt: skip
        if failed:
            raise ZenFlowError(
                "a replay ran out of memory" if failed == 1 else "a step never ends"
            )
        return Replayed(ends, stalls, busy)
