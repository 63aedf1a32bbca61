"""Steady states: mean steps without spans, for whoever asks for many of them.

A schedule of the engine on one device is recorded once. C code settles the recording on as many
machines as share its blocks, windows and memory. SimPy simulates all others, and everything where
the C code is not built. Both give one result up to rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from sim.replay.arrays import FOUND, Array, Measuring, Recorded, rates_of
from sim.replay.library import replay_library
from sim.replay.record import record
from sim.replay.tape import LANES, WORKS, CannotRecordError, times_of
from sim.simulate import (
    LONGEST_SETTLING,
    PASSES,
    SETTLING_WINDOWS,
    STEADY,
    Prediction,
    Strategy,
    measured_steps,
    selects_every,
    simulate,
    steps_to_next_selection,
)
from sim.timing.block_plan import Structure, structure_of
from sim.timing.costs import StepCosts
from zenflow.trace.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadyStates:
    """Steady steps of N machines: fields of `Prediction`, as arrays (N,). See `steady_many`."""

    step_seconds: Array
    """Mean seconds of a step."""
    slowest_step_seconds: Array
    """Seconds of the longest step, selections aside."""
    stall_seconds: Array
    """Mean seconds of a step in which the device waits."""
    selection_seconds: Array
    """Part of both that is selections of columns."""
    d2h_bytes: Array
    """Bytes to the host, per step."""
    h2d_bytes: Array
    """Bytes to the device, per step."""
    work_seconds: Mapping[str, Array]
    """Seconds of each of `WORKS`, per step; `steady_many` does not count them."""
    lanes: tuple[str, ...]
    """Lanes that do anything."""


def steady(
    costs: StepCosts,
    strategy: Strategy,
    *,
    pinned: bool = True,
    num_steps: int | None = None,
    settling_windows: int = SETTLING_WINDOWS,
    longest_settling: int = LONGEST_SETTLING,
) -> Prediction:
    """Return the prediction of `sim.simulate.simulate`, without spans.

    Args:
        costs: Of one step of the model on the machine.
        strategy: What to run.
        pinned: Whether the host's copy buffers are pinned.
        num_steps: Measured steps, rounded up to whole windows; None for a few windows.
        settling_windows: Windows before those, at least; more where queues still grow.
        longest_settling: Windows after which a run is taken as it is.

    Raises:
        ConfigError: The strategy's options are wrong.

    Examples:
        >>> from sim.hardware.catalog import find_machine
        >>> from sim.models.table import find_model
        >>> from sim.models.workload import Workload
        >>> from sim.timing.costs import costs_of
        >>> workload = Workload.of_config(*find_model("gpt2"), batch_size=8)
        >>> costs = costs_of(workload, find_machine("hgx-h100", 1))
        >>> fast = steady(costs, Strategy.of("zenflow", update_interval=8))
        >>> slow = steady(costs, Strategy.of("zero_offload"))
        >>> slow.step_seconds > 1.5 * fast.step_seconds
        True
    """
    try:
        found = _recording_of(costs, strategy).settle(
            np.array([rates_of(costs, pinned=pinned)]),
            np.array([times_of(costs)]),
            0 if strategy.config is None else selects_every(strategy.config),
            num_steps=num_steps,
            settling_windows=settling_windows,
            longest_settling=longest_settling,
            counts_work=True,
        )
    except CannotRecordError:
        return simulate(
            costs, strategy, pinned=pinned, keeps_spans=False, num_steps=num_steps,
            settling_windows=settling_windows, longest_settling=longest_settling,
        )  # fmt: skip
    return _prediction(strategy.name, found)


def steady_many(costs: StepCosts, strategy: Strategy, rates: Array, times: Array) -> SteadyStates:
    """Return steady steps of a strategy on N machines that share blocks, windows and memory.

    Args:
        costs: Of one of the machines.
        strategy: What to run.
        rates: `sim.replay.arrays.rates_of` each machine, (N, 12).
        times: `sim.replay.tape.times_of` each, (N, P), or of all of them, (1, P).

    Raises:
        CannotRecordError: The schedule can't be recorded, or the C code is not built: take
            `steady` for each machine.

    Examples:
        Links of half and of twice the speed:

        >>> from sim.hardware.catalog import find_machine
        >>> from sim.models.table import find_model
        >>> from sim.models.workload import Workload
        >>> from sim.timing.costs import costs_of
        >>> workload = Workload.of_config(*find_model("gpt2"), batch_size=8)
        >>> costs = costs_of(workload, find_machine("hgx-h100", 1))
        >>> rates, times = np.array([rates_of(costs)] * 2), np.array([times_of(costs)])
        >>> rates[:, :3] *= [[0.5], [2.0]]  # to the host, to the device, both
        >>> found = steady_many(costs, Strategy.of("zero_offload"), rates, times)
        >>> bool(found.step_seconds[0] > found.step_seconds[1])
        True
    """
    config = strategy.config
    every = 0 if config is None else selects_every(config)
    return _recording_of(costs, strategy).settle(rates, times, every)


def _recording_of(costs: StepCosts, strategy: Strategy) -> Recording:
    """Return a recording of the strategy's schedule, which costs of one structure share.

    Raises:
        CannotRecordError: It is none of the engine's on one device, it does not repeat, or the C
            code is not built.
    """
    if strategy.config is None:
        raise CannotRecordError("only the engine's schedules are recorded")
    if costs.hardware.total_devices > 1:
        raise CannotRecordError("a tape has the lanes of one device")
    if any(segment.leaving for segment in costs.segments):
        raise CannotRecordError("activations on the host are no part of a structure")
    if strategy.streams is not None:
        raise CannotRecordError("a tape has no lanes of streamed weights")
    if strategy.state_on_drive:
        raise CannotRecordError("a tape has no lanes of a drive")
    if replay_library() is None:
        raise CannotRecordError("the replay is not built")
    return _recording(structure_of(costs, strategy.config, releases=strategy.releases))


@functools.lru_cache(maxsize=64)
def _recording(structure: Structure) -> Recording:
    return Recording(structure)


class Recording:
    """An engine's schedule, recorded where it is first asked for."""

    def __init__(self, structure: Structure) -> None:
        """Take the structure of the schedule."""
        self._structure = structure
        self._period = structure.config.update_interval
        self._recorded: dict[int | None, Recorded | CannotRecordError] = {}
        """Recordings by the phase of a selection, None for none."""

    def settle(
        self,
        rates: Array,
        times: Array,
        select_every: int,
        *,
        num_steps: int | None = None,
        settling_windows: int = SETTLING_WINDOWS,
        longest_settling: int = LONGEST_SETTLING,
        counts_work: bool = False,
    ) -> SteadyStates:
        """Return the steady steps of N machines; see `steady` and `steady_many`.

        Args:
            rates: `rates_of` each, (N, 12).
            times: `times_of` each, (N, P), or of all of them, (1, P).
            select_every: Number of steps between selections of columns; 0 where none recur.
            num_steps: Measured steps, rounded up to whole windows.
            settling_windows: Windows before those, at least.
            longest_settling: Windows after which a run is taken as it is.
            counts_work: Whether seconds of work are asked for.

        Raises:
            CannotRecordError: The schedule does what no tape can hold, or does not repeat.
        """
        found = np.full((len(FOUND), len(rates)), np.nan)
        left = np.arange(len(rates))
        warm_up = self._structure.config.full_warm_up_rounds
        settling = warm_up + settling_windows * self._period
        measured = measured_steps(self._period, num_steps)
        while len(left):
            to_next = steps_to_next_selection(settling, warm_up)
            measuring = Measuring(
                settling=settling,
                measured=measured,
                delayed=min(measured, to_next) if select_every else 0,
                counts_work=counts_work,
                steady_share=STEADY,
            )
            recorded = self._recorded_for(measuring)
            own = times if len(times) == 1 else times[left]
            columns, is_over = recorded.settle(measuring, rates[left], own)
            is_over |= settling > longest_settling * self._period
            found[:, left[is_over]] = columns[:, is_over]
            left = left[~is_over]
            settling *= 2  # queues are still growing: a long lag takes its time to fill up
        step, slowest, stall, selection, *works = found
        selection = selection / select_every if select_every else selection
        return SteadyStates(
            step_seconds=step + selection,
            slowest_step_seconds=slowest,
            stall_seconds=stall + selection,
            selection_seconds=selection,
            d2h_bytes=np.full(len(rates), recorded.moved_bytes("d2h")),
            h2d_bytes=np.full(len(rates), recorded.moved_bytes("h2d")),
            work_seconds=dict(zip(WORKS, works, strict=True)),
            lanes=recorded.lanes,
        )

    def _recorded_for(self, measuring: Measuring) -> Recorded:
        """Return a recording, with a selection in phase behind the steps that settle, if any."""
        phase = measuring.settling % self._period if measuring.delayed else None
        if phase not in self._recorded:
            try:
                self._recorded[phase] = record(self._structure, phase)
            except CannotRecordError as error:
                self._recorded[phase] = error
        recorded = self._recorded[phase]
        if isinstance(recorded, CannotRecordError):
            raise CannotRecordError(str(recorded))
        if recorded.num_steady - self._period > measuring.settling:
            raise CannotRecordError("the schedule repeats later than it is measured")
        return recorded


def _prediction(name: str, found: SteadyStates) -> Prediction:
    """Return the first machine's step as a prediction of the strategy of this name."""
    work = {key: float(seconds[0]) for key, seconds in found.work_seconds.items()}
    device = sum(work[key] for key in WORKS if key not in LANES)
    busy = {lane: work.get(lane, device) for lane in found.lanes}
    return Prediction(
        strategy=name,
        step_seconds=float(found.step_seconds[0]),
        slowest_step_seconds=float(found.slowest_step_seconds[0]),
        stall_seconds=float(found.stall_seconds[0]),
        selection_seconds=float(found.selection_seconds[0]),
        d2h_bytes=float(found.d2h_bytes[0]),
        h2d_bytes=float(found.h2d_bytes[0]),
        busy_seconds=busy,
        passes={key: work[key] for key in PASSES},
        update_seconds=work["step"],
        timeline=Timeline((), {"source": "simulated", "strategy": name}),
    )
