"""Arrays: the steps of a recording, in the order in which the C code runs them."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.replay.library import TAPE_ARRAYS, CTape, replay_library
from sim.replay.tape import GAP, JOB, LANES, OPERATION, STEP, Tape
from zenflow.errors import ZenFlowError

Array = NDArray[np.float64]
Places = NDArray[np.int64]
RATES = ("d2h", "h2d", "duplex", "dram", "sharing", "host_sharing", "host", "steps")
"""Fields of `Rates` that a tape is replayed with, in the order of the C code."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of different lengths in one flat array (a ragged array, or CSR's row pointers)."""

    begins: Places
    """Index at which each row begins, and the last one ends, (R + 1,)."""

    @classmethod
    def of(cls, counts: Sequence[int] | Places) -> Rows:
        """Return rows of these lengths."""
        return cls(np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]))

    @property
    def counts(self) -> Places:
        """Length of each row, (R,)."""
        return np.diff(self.begins)

    def picked(self, rows: Places) -> tuple[Places, Rows]:
        """Return the places of all elements of some rows, in order, and the rows there."""
        counts = self.counts[rows]
        found = Rows.of(counts)
        moved = found.spread(self.begins[rows] - found.begins[:-1])
        return np.arange(found.begins[-1]) + moved, found

    def spread(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return each row's value for every element of the row."""
        return np.repeat(values, self.counts)


class StepArrays:
    """All steps of a tape as arrays, with its relative references.

    Attributes:
        count: Number of steps.
        jobs: Numbers of all jobs by name.
        job_rows: Those of each step.
    """

    def __init__(self, tape: Tape) -> None:
        """Take a tape whose last step has ended."""
        steps = _columns(tape.steps, STEP)
        self.count, self.stall_begin = len(steps["num_jobs"]), steps["stall_begin"]
        self.job_rows = Rows.of(steps["num_jobs"])
        self.operation_rows = Rows.of(steps["num_operations"])
        self.gap_rows = Rows.of(steps["num_gaps"])
        self.jobs = _columns(tape.jobs, JOB)
        self.after, self.after_rows = np.array(tape.after), Rows.of(self.jobs["num_after"])
        self.operations, self.gaps = _columns(tape.operations, OPERATION), _columns(tape.gaps, GAP)
        self.room, self.room_rows = np.array(tape.rooms), Rows.of(self.gaps["num_room"])
        self._counts = np.array([len(own) for own in tape.seconds], int)
        self._places = np.array([*chain.from_iterable(tape.seconds)], int)
        self._factors = np.array([factor for own in tape.seconds for factor in own.values()])

    def seconds(self, times: Array) -> Array:
        """Return each of S sums of times on N machines, (N, S), by their times, (N, P)."""
        found = np.zeros((len(times), len(self._counts)))
        owner = np.repeat(np.arange(len(self._counts)), self._counts)
        for index, machine in enumerate(times):
            weights = machine[self._places] * self._factors
            found[index] = np.bincount(owner, weights=weights, minlength=len(self._counts))
        return found


def _columns(rows: array[Any], names: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Return rows of numbers as a column for each name."""
    return dict(zip(names, np.array(rows).reshape(-1, len(names)).T, strict=True))


@dataclass(frozen=True, slots=True)
class Replayed:
    """Results of N machines over T steps."""

    ends: Array
    """Seconds at which each of T steps ended, (N, T)."""
    stalls: Array
    """Seconds of each step in which the device waited, (N, T)."""
    busy: Array
    """Seconds of work of each lane in the steps behind those that settle, (N, lanes)."""


class TapeArrays:
    """Steps in a row, ready to be simulated."""

    def __init__(self, recorded: StepArrays, order: Sequence[int], settling: int) -> None:
        """Put recorded steps in a row.

        Args:
            recorded: The steps.
            order: Place of each of T steps among them.
            settling: Number of the first steps whose work is not counted.
        """
        picks = np.array(order)
        jobs, job_rows = recorded.job_rows.picked(picks)
        after, after_rows = recorded.after_rows.picked(jobs)
        operations, operation_rows = recorded.operation_rows.picked(picks)
        gaps, gap_rows = recorded.gap_rows.picked(picks)
        rooms, room_rows = recorded.room_rows.picked(gaps)
        columns = {name: column[jobs] for name, column in recorded.jobs.items()}
        numbers, firsts = job_rows.spread(np.arange(1, len(picks) + 1)), job_rows.begins[:-1]
        awaited = recorded.operations["awaited"][operations]
        submitted = recorded.operations["submitted"][operations] + operation_rows.spread(firsts)
        behind = after_rows.spread(np.arange(len(jobs))) - recorded.after[after]
        waits = np.where(awaited > 0, submitted - awaited, -1)
        is_awaited = np.zeros(len(jobs), bool)  # an end that nobody waits for is no event
        is_awaited[behind] = is_awaited[waits[waits >= 0]] = True
        arrays: dict[str, NDArray[Any]] = {
            **columns,
            "is_awaited": is_awaited,
            "step": columns["step"] + numbers,
            "deadline": columns["deadline"] + numbers,
            "after_at": after_rows.begins,
            "after": behind,
            "awaited": waits,
            "submitted": submitted,
            "step_end": operation_rows.begins[1:] - 1,
            "stall_begin": operation_rows.begins[:-1] + recorded.stall_begin[picks],
            "gap_at": gap_rows.begins,
            "passed": recorded.gaps["passed"][gaps] + gap_rows.spread(firsts),
            "room_at": room_rows.begins,
            "room": recorded.room[rooms] + room_rows.spread(gap_rows.spread(firsts)),
        }
        self._recorded = recorded
        self._seconds = columns["seconds"].astype(int)
        self._sleep = recorded.operations["sleep"][operations]
        self._num_steps = len(picks)
        self._arrays = {
            name: np.ascontiguousarray(arrays[name], dtype) for name, dtype in TAPE_ARRAYS.items()
        }
        self._tape = CTape(
            num_jobs=len(jobs), num_operations=len(operations), num_steps=len(picks),
            settling=settling, **{name: own.ctypes.data for name, own in self._arrays.items()},
        )  # fmt: skip

    def replay(self, rates: Array, times: Array) -> Replayed:
        """Replay the steps on N machines.

        Args:
            rates: `RATES` of each machine, (N, 8).
            times: `times_of` each, (N, P), or of all of them, (1, P).

        Raises:
            ZenFlowError: The library is not built, memory is short, or a step never ends.
        """
        library = replay_library()
        if library is None:
            raise ZenFlowError("the replay is not built: simulate with sim.simulate")
        rates = np.ascontiguousarray(rates, np.float64)
        sums = self._recorded.seconds(times)
        seconds, sleeps = sums.take(self._seconds, axis=1), sums.take(self._sleep, axis=1)
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
