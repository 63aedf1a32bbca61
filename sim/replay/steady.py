"""Steady states of one schedule on many machines, equal to those of `sim.simulate`."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sim.replay.arrays import TapeArrays
from sim.replay.library import replay_library
from sim.replay.record import Recorded, record
from sim.replay.tape import LANES, CannotRecordError
from sim.simulate import (
    LONGEST_SETTLING,
    SETTLING_WINDOWS,
    Strategy,
    is_steady,
    measured_steps,
)
from sim.timing.block_plan import Structure, structure_of
from sim.timing.costs import StepCosts

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SteadyStates:
    """A steady step of each of N machines: fields of `Prediction` with these names."""

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


def recording_of(costs: StepCosts, strategy: Strategy) -> Recording:
    """Return a recording of the strategy's schedule, which costs of one structure share.

    Raises:
        CannotRecordError: It is none of the engine's in release mode on one GPU, it does not
            repeat, or the replay is not built: `sim.simulate` does it.
    """
    hardware = costs.hardware
    if strategy.config is None or not strategy.releases:
        raise CannotRecordError("only the engine's schedules in release mode are recorded")
    if hardware.device.is_cpu or hardware.total_devices > 1:
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
        """Record the schedule of a structure.

        Raises:
            CannotRecordError: It does what no tape can hold, or does not repeat.
        """
        self._structure = structure
        self._period = structure.config.update_interval
        self._settling = structure.config.full_warm_up_rounds + SETTLING_WINDOWS * self._period
        self._measured = measured_steps(self._period)
        self._recorded: dict[int, Recorded] = {}
        self._tapes: dict[int, tuple[TapeArrays, TapeArrays]] = {}
        steady = self._recorded_at(self._settling).num_steady
        if steady - self._period > self._settling:
            raise CannotRecordError("the schedule repeats later than it is measured")

    def steady(self, rates: Array, times: Array, select_every: int) -> SteadyStates:
        """Return the steady states of N machines.

        Args:
            rates: `RATES` of each, (N, 8).
            times: `times_of` each, (N, P), or of all of them, (1, P).
            select_every: Number of steps between selections of columns; 0 where none recur.
        """
        found = np.zeros((3, len(rates)))
        left = np.arange(len(rates))
        settling = self._settling
        while len(left):
            own = times if len(times) == 1 else times[left]
            plain, selecting = self._tapes_behind(settling)
            done = plain.replay(rates[left], own)
            lengths = np.diff(done.ends[:, settling - 1 :], axis=1)
            is_over = np.array(
                [
                    settling > LONGEST_SETTLING * self._period
                    or is_steady(steps.tolist(), self._period, dict(zip(LANES, busy, strict=True)))
                    for steps, busy in zip(lengths, done.busy / self._measured, strict=True)
                ]
            )
            over, own = left[is_over], own if len(own) == 1 else own[is_over]
            found[0, over] = lengths[is_over].sum(axis=1) / self._measured
            found[1, over] = done.stalls[is_over, settling:].sum(axis=1) / self._measured
            if select_every and len(over):
                ends = selecting.replay(rates[over], own).ends
                late = ends[:, -1] - done.ends[is_over, ends.shape[1] - 1]
                found[2, over] = np.maximum(0.0, late) / select_every
            left = left[~is_over]
            settling *= 2
        step, stall, selection = found
        recorded = self._recorded_at(self._settling)
        sizes = [recorded.moved_bytes(LANES.index(name)) for name in ("d2h", "h2d")]
        moved = [np.full(len(rates), size) for size in sizes]
        return SteadyStates(step + selection, stall + selection, selection, *moved)

    def _tapes_behind(self, settling: int) -> tuple[TapeArrays, TapeArrays]:
        """Return the tapes after so many settling steps: without a selection, and with one.

        As in `sim.simulate` the selection is asked for in the step right behind those that settle,
        and its tape ends before another one would fall due.
        """
        if settling not in self._tapes:
            recorded, total = self._recorded_at(settling), settling + self._measured
            plain = [recorded.place(step) for step in range(total)]
            chosen = [*plain[:settling], *recorded.selecting]
            chosen += plain[len(chosen) :]
            self._tapes[settling] = (
                TapeArrays(recorded.steps, plain, settling),
                TapeArrays(recorded.steps, chosen[: min(total, 2 * settling)], settling),
            )
        return self._tapes[settling]

    def _recorded_at(self, settling: int) -> Recorded:
        """Return a recording with a selection that is in phase behind so many steps."""
        phase = settling % self._period
        if phase not in self._recorded:
            self._recorded[phase] = record(self._structure.costs, self._structure.config, phase)
        return self._recorded[phase]
