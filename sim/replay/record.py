"""Record: a schedule as steps of a tape, until they repeat."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sim.replay.stand_ins import (
    Sum,
    Tape,
    TapeCosts,
    TapedSchedule,
    TapeMachine,
    seconds_of,
)
from sim.replay.tape import CannotRecordError, Gap, Operation, Step
from sim.schedules.zenflow import EngineSchedule
from sim.timing.costs import StepCosts
from zenflow.config import ZenFlowConfig

_MOST_WINDOWS = 12
"""Windows after which a schedule that has not repeated is given up."""
_ENDLESS = 1 << 40


@dataclass(frozen=True, slots=True)
class Recorded:
    """The steps of a schedule until they repeat, and some that follow a selection."""

    steady: list[Step]
    """Steps from the first on; the last window is as the one before it."""
    selecting: list[Step]
    """Steps right behind those, the first of which asks for a selection."""


def record(costs: StepCosts, config: ZenFlowConfig, period: int, num_selecting: int) -> Recorded:
    """Return the engine's schedule in release mode on one GPU.

    Args:
        costs: Of one step of the model.
        config: The update rule's settings, without selections that recur.
        period: Steps after which a steady state repeats.
        num_selecting: Number of steps to record behind the steady ones, with a selection.

    Raises:
        CannotRecordError: It does what no tape can hold, or does not repeat.
    """
    with _no_collection():
        try:
            return _recorded(costs, config, period, num_selecting)
        except TypeError as error:  # of a stand-in, which has no such operation
            raise CannotRecordError(
                f"the schedule computes what no tape can hold: {error}"
            ) from error


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the collector of cycles still: hundreds of thousands of tuples would wake it often."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _recorded(
    costs: StepCosts, config: ZenFlowConfig, period: int, num_selecting: int
) -> Recorded:
    machine = TapeMachine(costs)
    schedule = TapedSchedule(machine, costs, config)
    schedule.costs = TapeCosts(costs)  # type: ignore[assignment]
    recorder = _Recorder(machine.tape, schedule)
    window: list[Step] = []
    recorder.take(config.full_warm_up_rounds)
    for _ in range(_MOST_WINDOWS):
        before, window = window, recorder.take(period)
        if [step.moved(period) for step in before] == window:
            break
    else:
        raise CannotRecordError("the schedule does not repeat")
    steady = list(recorder.steps)
    schedule.selects_in = len(steady) + 1
    return Recorded(steady, recorder.take(num_selecting))


class _Recorder:
    """Takes steps, and cuts the tape into them."""

    def __init__(self, tape: Tape, schedule: EngineSchedule) -> None:
        self.steps: list[Step] = []
        self._tape = tape
        self._schedule = schedule
        self._process = schedule.run(_ENDLESS)
        self._from = (0, 0, 0)
        """Jobs, operations and gaps of the steps so far."""
        self._event = next(self._process)

    def take(self, count: int) -> list[Step]:
        """Return so many further steps."""
        done = len(self.steps)
        while len(self.steps) < done + count:
            # The first event of the next step comes with what this one submits in the end.
            self._tape.wait(self._event)
            ended = len(self._schedule.step_ends)
            self._event = next(self._process)
            if len(self._schedule.step_ends) > ended:
                self.steps.append(
                    self._cut(self._schedule.step_ends[-1], self._schedule.stalls[-1])
                )
        return self.steps[done:]

    def _cut(self, end: Any, stall: Any) -> Step:
        """Return the step that has ended.

        Raises:
            CannotRecordError: Its end or its stall is no plain difference of moments.
        """
        tape = self._tape
        job_from, operation_from, gap_from = self._from
        last, begin, gaps = _moments(end, stall)
        job_to = tape.operations[last][1]
        if gaps != list(range(gap_from, gap_from + len(gaps))):
            raise CannotRecordError("a step's stall has another step's waits in it")
        gap_to = gap_from + len(gaps)
        self._from = job_to, last + 1, gap_to
        return Step(
            jobs=tape.jobs[job_from:job_to],
            operations=list(_operations(tape, operation_from, last + 1, job_from)),
            gaps=[
                Gap(gap.passed - job_from, tuple([other - job_from for other in gap.room]))
                for gap in tape.gaps[gap_from:gap_to]
            ],
            stall_begin=begin - operation_from,
        )


def _operations(tape: Tape, first: int, end: int, job_from: int) -> Iterator[Operation]:
    for event, submitted in tape.operations[first:end]:
        awaited = None if event.job is None else submitted - event.job
        yield Operation(awaited, seconds_of(event.sleep), submitted - job_from)


def _moments(end: Any, stall: Any) -> tuple[int, int, list[int]]:
    """Return the operations of a step's end and of its stall's begin, and the gaps in its stall.

    Raises:
        CannotRecordError: They are made of something else.
    """
    (last,) = end.terms
    terms = dict(stall.terms) if isinstance(stall, Sum) else {}
    gaps = [key[1] for key in terms if isinstance(key, tuple)]
    moments = {key: factor for key, factor in terms.items() if not isinstance(key, tuple)}
    if any(terms["gap", gap] != 1.0 for gap in gaps):
        raise CannotRecordError("a wait within backward counts more than once")
    if not moments:
        return last, last, gaps
    begin = next((key for key, factor in moments.items() if factor == -1.0), None)
    if begin is None or moments != {last: 1.0, begin: -1.0}:
        raise CannotRecordError("a stall is more than one wait")
    return last, begin, gaps
