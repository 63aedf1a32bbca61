"""Arrays: a recording as the C code reads it, and what that code finds on many machines."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.machine import Rates
from sim.replay.library import TAPE_ARRAYS, CTape, replay_library, type_of
from sim.replay.tape import GAP, JOB, LANES, OPERATION, STEP, WORKS, Tape
from sim.timing.costs import StepCosts
from zenflow.errors import ZenFlowError

Array = NDArray[np.float64]
RATES = (
    "d2h", "h2d", "duplex", "dram", "sharing", "host_sharing", "host", "steps", "cores", "core",
    "pack", "unpack",
)  # fmt: skip
"""Rates with which a tape is replayed, in the order of the C code: fields of `Rates`, and bytes/s
at which columns are packed and unpacked."""
FOUND = ("step", "slowest", "stall", "selection", *WORKS)
"""Columns of what the C code finds."""


def rates_of(costs: StepCosts, *, pinned: bool = True) -> list[float]:
    """Return `RATES` of the machine of these costs."""
    rates, overheads = Rates.of(costs.hardware, pinned=pinned), costs.hardware.overheads
    pack = overheads.pack_bandwidth
    own = [pack.value, (overheads.unpack_bandwidth or pack).value]
    return [*(float(getattr(rates, name)) for name in RATES[:-2]), *own]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measuring:
    """Steps that are simulated and measured, and what is asked for."""

    settling: int
    """Number of the first steps, which are not measured."""
    measured: int
    """Number of the steps behind them, a multiple of the period."""
    delayed: int
    """Number of steps over which the delay by a selection is measured; 0 for none."""
    counts_work: bool
    """Whether seconds of work are asked for."""
    steady_share: float
    """Relative difference of two windows that counts as none."""


class Recorded:
    """Steps of a schedule until they repeat, and some that follow a selection.

    Attributes:
        num_steady: Number of steps without a selection.
        num_steps: Number of all steps.
        lanes: Names of the lanes that do anything.
    """

    def __init__(self, tape: Tape, num_steady: int, period: int, *, is_cpu: bool) -> None:
        """Take a tape whose last step has ended.

        Args:
            tape: Steps without a selection, then those behind one until they repeat again.
            num_steady: Number of the former.
            period: Number of the last of these that come again and again.
            is_cpu: Whether a CPU plays the device.
        """
        steps, jobs = _columns(tape.steps, STEP), _columns(tape.jobs, JOB)
        gaps, operations = _columns(tape.gaps, GAP), _columns(tape.operations, OPERATION)
        job_at = _begins(steps["num_jobs"])
        self.num_steady, self.num_steps = num_steady, len(steps["num_jobs"])
        self.lanes = tuple(name for lane, name in enumerate(LANES) if (jobs["lane"] == lane).any())
        repeated = slice(*job_at[[num_steady - period, num_steady]])
        self._moved = np.bincount(
            jobs["lane"][repeated].astype(int), jobs["counted"][repeated] / period, len(LANES)
        )
        arrays: dict[str, Any] = {
            **jobs, **operations, **gaps,
            "job_at": job_at,
            "operation_at": _begins(steps["num_operations"]),
            "gap_at": _begins(steps["num_gaps"]),
            "stall_begin": steps["stall_begin"],
            "after_at": _begins(jobs["num_after"]),
            "after": tape.after,
            "room_at": _begins(gaps["num_room"]),
            "room": tape.rooms,
            "sum_at": _begins([len(own) for own in tape.seconds]),
            "place": [*chain.from_iterable(tape.seconds)],
            "factor": [factor for own in tape.seconds for factor in own.values()],
        }  # fmt: skip
        self._arrays = {
            name: np.ascontiguousarray(arrays[name], type_of(name)) for name in TAPE_ARRAYS
        }
        self._tape = CTape(
            num_steps=self.num_steps, num_steady=num_steady, period=period,
            is_cpu=is_cpu, num_sums=len(tape.seconds), most_jobs=int(steps["num_jobs"].max()),
            most_operations=int(steps["num_operations"].max()),
            **{name: own.ctypes.data for name, own in self._arrays.items()},
        )  # fmt: skip

    def moved_bytes(self, lane: str) -> float:
        """Return the bytes that a lane of copies moves in a step, on average over a period."""
        return float(self._moved[LANES.index(lane)])

    def settle(
        self, measuring: Measuring, rates: Array, times: Array
    ) -> tuple[Array, NDArray[np.bool_]]:
        """Return steady steps of N machines, and which of them are steady, (N,).

        A row for each of `FOUND`, (10, N).

        Args:
            measuring: Steps to simulate.
            rates: `RATES` of each machine, (N, 12).
            times: `times_of` each, (N, P), or of all of them, (1, P).

        Raises:
            ZenFlowError: The library is not built, memory is short, or a step never ends.
        """
        library = replay_library()
        if library is None:
            raise ZenFlowError("the replay is not built: simulate with sim.simulate")
        rates, times = (np.ascontiguousarray(given, np.float64) for given in (rates, times))
        found = np.empty((len(rates), len(FOUND)))
        is_steady = np.empty(len(rates), np.bool_)
        failed = library.sim_settle(
            ctypes.byref(self._tape), measuring.settling, measuring.measured, measuring.delayed,
            measuring.counts_work, measuring.steady_share, rates.ctypes.data, times.ctypes.data,
            times.shape[1] if len(times) > 1 else 0, len(rates), found.ctypes.data,
            is_steady.ctypes.data,
        )  # fmt: skip
        if failed:
            raise ZenFlowError("memory is short, or a step of the schedule never ends")
        return found.T, is_steady


def _columns(rows: array[Any], names: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Return rows of numbers as a column for each name."""
    return dict(zip(names, np.array(rows).reshape(-1, len(names)).T, strict=True))


def _begins(counts: Sequence[int] | NDArray[Any]) -> NDArray[np.int64]:
    """Return the index at which each row of a ragged array begins, and the last one ends."""
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
