"""Steady states of one schedule on many machines, as `sim.simulate` finds them by SimPy."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sim.replay.arrays import StepArrays, TapeArrays
from sim.replay.library import replay_library
from sim.replay.record import record
from sim.replay.tape import LANES, CannotRecordError
from sim.simulate import (
    LONGEST_SETTLING,
    SETTLING_WINDOWS,
    Strategy,
    is_steady,
    measured_steps,
    selecting_every,
    selects_every,
)
from sim.timing.block_plan import Structure, structure_of
from sim.timing.costs import StepCosts

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SteadyStates:
    """A steady step of each of N machines: as the fields of `Prediction` of the same names."""

    step_seconds: Array
    """Mean seconds of a step, (N,)."""
    stall_seconds: Array
    """Mean seconds of a step in which the device waits, (N,)."""
    selection_seconds: Array
    """Share of both that is selections of columns, (N,)."""
    d2h_bytes: Array
    """Bytes to the host, per step, (N,)."""
    h2d_bytes: Array
    """Bytes to the device, per step, (N,)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tapes:
    """What is replayed behind so many steps that settle."""

    plain: TapeArrays
    measured: int
    """Number of its steps whose work is counted."""
    selecting: TapeArrays | None
    """The same steps with a selection; None where none recurs."""
    after: int
    """Number of steps of the plain one that end when those with a selection do."""


def recording_of(costs: StepCosts, strategy: Strategy) -> Recording:
    """Return a recording of the strategy's schedule, which costs of one structure share.

    Raises:
        CannotRecordError: It is none of the engine's in release mode on one GPU, it does not
            repeat, or the replay is not built: `sim.simulate` does it.
    """
    hardware = costs.hardware
    if strategy.config is None or not strategy.releases:
        raise CannotRecordError("only the engine's schedules in release mode are recorded")
    if hardware.device.is_cpu or hardware.num_devices > 1:
        raise CannotRecordError("a tape has the lanes of one GPU")
    if any(segment.leaving for segment in costs.segments):
        raise CannotRecordError("activations on the host are no part of a structure")
    if replay_library() is None:
        raise CannotRecordError("the replay is not built")
    return _recording(structure_of(costs, strategy.config))


@functools.lru_cache(maxsize=64)
def _recording(structure: Structure) -> Recording:
    return Recording(structure)


class Recording:
    """An engine's schedule, recorded until it repeats."""

    def __init__(self, structure: Structure) -> None:
        """Record it.

        Raises:
            CannotRecordError: It does what no tape can hold, or does not repeat.
        """
        strategy = Strategy(name="", config=structure.config)
        self._period = period = strategy.period
        self._measured = measured_steps(period)
        self._settling = strategy.warm_up + SETTLING_WINDOWS * period
        self._every = selects_every(structure.config)
        config = selecting_every(strategy, 0).config
        assert config is not None
        after = min(self._measured, self._settling) if self._every else 0
        recorded = record(structure.costs, config, period, after)
        self._steps = [StepArrays.of(step) for step in recorded.steady]
        self._selecting = [StepArrays.of(step) for step in recorded.selecting]
        self._tapes: dict[int, _Tapes] = {}

    def steady(self, rates: Array, times: Array) -> SteadyStates:
        """Return the steady states of N machines.

        Args:
            rates: `RATES` of each, (N, 7).
            times: `times_of` each, (N, P), or of all of them, (1, P).
        """
        found = np.empty((5, len(rates)))
        left = np.arange(len(rates))
        settling = self._settling
        while len(left):
            own = times if len(times) == 1 else times[left]
            values, is_over = self._settled(rates[left], own, settling)
            if settling > LONGEST_SETTLING * self._period:
                is_over[:] = True
            found[:, left[is_over]] = values[:, is_over]
            left = left[~is_over]
            settling *= 2
        return SteadyStates(*found)

    def _settled(
        self, rates: Array, times: Array, settling: int
    ) -> tuple[Array, NDArray[np.bool_]]:
        """Return the figures behind so many steps, (5, N), and where they are steady."""
        measured, end = self._measured, settling + self._measured
        if settling not in self._tapes:
            self._tapes[settling] = self._tapes_of(settling)
        tapes = self._tapes[settling]
        done = tapes.plain.replay(rates, times)
        lengths = np.diff(done.ends[:, settling - 1 : end], axis=1)
        is_over = np.array(
            [
                is_steady(own.tolist(), self._period, dict(zip(LANES, busy, strict=True)))
                for own, busy in zip(lengths, done.busy / tapes.measured, strict=True)
            ]
        )
        selection = np.zeros(len(rates))
        if tapes.selecting is not None:
            late = tapes.selecting.replay(rates, times).ends[:, -1] - done.ends[:, tapes.after - 1]
            selection = np.maximum(0.0, late) / self._every
        values = np.array(
            [
                lengths.sum(axis=1) / measured + selection,
                done.stalls[:, settling:end].sum(axis=1) / measured + selection,
                selection,
                *(np.full(len(rates), self._moved_bytes(name)) for name in ("d2h", "h2d")),
            ]
        )
        return values, is_over

    def _tapes_of(self, settling: int) -> _Tapes:
        # The selection falls on the phase that it was recorded in.
        windows = max(0, -(-(settling - len(self._steps)) // self._period))
        at = len(self._steps) + windows * self._period
        after = at + len(self._selecting)
        steps = self._repeated(max(settling + self._measured, after) + 1)
        again = [step.moved(windows * self._period) for step in self._selecting]
        return _Tapes(
            plain=TapeArrays(steps[:-1], settling, rest=steps[-1]),
            measured=len(steps) - 1 - settling,
            selecting=TapeArrays([*steps[:at], *again], settling) if self._every else None,
            after=after,
        )

    def _moved_bytes(self, lane: str) -> float:
        """Return the bytes that a lane moves in a step, on average over a window."""
        window = self._steps[-self._period :]
        return sum(step.counted(LANES.index(lane)) for step in window) / self._period

    def _repeated(self, count: int) -> list[StepArrays]:
        """Return so many steps without a selection, of which the last window goes on for ever."""
        steps = self._steps[:count]
        window = self._steps[-self._period :]
        while len(steps) < count:
            moved = len(steps) - len(self._steps) + self._period
            steps = [*steps, *(step.moved(moved) for step in window)]
        return steps[:count]
