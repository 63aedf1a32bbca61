"""Record: a schedule as steps of a tape, until its state repeats."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

from sim.replay.arrays import StepArrays
from sim.replay.stand_ins import Sum, TapeCosts, TapeMachine
from sim.replay.tape import CannotRecordError, Event
from sim.schedules.ring import Ring
from sim.schedules.schedule import Waits
from sim.schedules.zenflow import EngineSchedule, Landing
from sim.timing.block_plan import PlannedBlock
from sim.timing.costs import StepCosts
from zenflow.config import ZenFlowConfig

_MOST_WINDOWS = 12
"""Number of windows after which a schedule that does not repeat is given up."""
_AWAITED = ("copied", "staging_free", "last_update", "earlier")
"""Fields of a segment's state that are lists of events."""
_GAPS = "gaps"
"""Term of a stall that stands for all waits of backward in its step."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """Steps of a schedule until they repeat, and some that follow a selection."""

    steps: StepArrays
    """Steps without a selection, then those that follow one."""
    num_steady: int
    """Number of steps without a selection, from the first on."""
    period: int
    """Number of the last steady steps that come again and again."""

    @property
    def selecting(self) -> range:
        """Recorded steps from a selection until the schedule repeats again.

        After the last of them, the ordinary steps continue.
        """
        return range(self.num_steady, self.steps.count)

    def place(self, step: int) -> int:
        """Return the place of the step that follows so many others without a selection."""
        more = step - self.num_steady
        return step if more < 0 else self.num_steady - self.period + more % self.period

    def moved_bytes(self, lane: int) -> float:
        """Return the bytes that a lane of copies moves in a step, on average over a period."""
        first, end = self.steps.job_rows.begins[[self.num_steady - self.period, self.num_steady]]
        jobs = self.steps.jobs
        is_own = jobs["lane"][first:end] == lane
        return float(jobs["counted"][first:end][is_own].sum()) / self.period


def record(costs: StepCosts, config: ZenFlowConfig, phase: int) -> Recorded:
    """Return the engine's schedule in release mode on one GPU.

    Args:
        costs: Of one step of the model.
        config: The update rule's settings, without selections that recur.
        phase: Steps, modulo a window, behind which a selection is recorded.

    Raises:
        CannotRecordError: It does what no tape can hold, or does not repeat.
    """
    with _no_collection():
        try:
            return _recorded(costs, config, phase)
        except TypeError as error:  # of a stand-in, which has no such operation
            raise CannotRecordError(
                f"the schedule computes what no tape can hold: {error}"
            ) from error


@contextmanager
def _no_collection() -> Iterator[None]:
    """Stop the collector of cycles: hundreds of thousands of tuples would wake it often."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _recorded(costs: StepCosts, config: ZenFlowConfig, phase: int) -> Recorded:
    machine, period = TapeMachine(costs), config.update_interval
    schedule = TapedSchedule(machine, costs, config)
    schedule.costs = TapeCosts(costs)  # type: ignore[assignment]
    first = config.full_warm_up_rounds + period
    most = first + _MOST_WINDOWS * period
    states: list[_State] = []
    while len(states) <= first or states[-1] != states[-1 - period]:
        if len(states) == most:
            raise CannotRecordError("the schedule does not repeat")
        states.append(schedule.next_state())
    num_steady = len(states)
    if 0 < config.topk_ratio < 1:
        back = (num_steady - phase) % period
        schedule.go_back_to(states[num_steady - back - 1])
        schedule.selects_next = True
        usual = islice(cycle(states[-period:]), period - back, None)
        while schedule.next_state() != next(usual):
            if machine.tape.number > 2 * most:
                raise CannotRecordError("the schedule does not repeat behind a selection")
    return Recorded(StepArrays(machine.tape), num_steady, period)


class _TapeWaits(Waits):
    """Records each stall as a gap on the tape: its length is known only at replay."""

    seconds: Any

    def watch(self, passed: Any, causes: Sequence[Any], step: int) -> None:
        del step
        tape = self._machine.tape  # type: ignore[attr-defined]
        for _, events in causes:
            if events:
                tape.watch(passed, events)
                self.seconds = Sum({_GAPS: 1.0})


@dataclass(frozen=True, slots=True)
class _State:
    """Everything that the following steps depend on.

    Jobs are counted back from the last one, and steps from the last step. So equal states are
    followed by equal steps.
    """

    segments: list[list[list[int]]]
    landings: list[tuple[int, int, float, list[int]]]
    ring: list[tuple[float, list[int]]]
    intake: dict[str, Any]
    due: list[int]
    wants_selection: list[bool]


class TapedSchedule(EngineSchedule):
    """The engine's schedule, on a machine that records instead of running.

    Attributes:
        selects_next: Whether the next step asks for a selection, whatever the configuration says.
    """

    machine: TapeMachine
    selects_next = False
    _waits_type = _TapeWaits
    _ring: Ring

    def next_state(self) -> _State:
        """Take a step, and return the state after it."""
        tape = self.machine.tape
        step = tape.number
        for event in self.take(step):
            tape.wait(event)
        tape.end(*_moments(self.step_ends[-1], self.stalls[-1]))
        return self._state(step, tape.num_jobs)

    def _state(self, step: int, now: int) -> _State:
        def ago(events: Iterable[Any]) -> list[int]:
            return [now - event.job for event in events if not event.processed]

        return _State(
            segments=[[ago(getattr(own, name)) for name in _AWAITED] for own in self._states],
            landings=[
                (later - step, item.segment, item.num_bytes, ago([item.computed]))
                for later, items in sorted(self._landings.items())
                for item in items
            ],
            ring=[(size, ago(events)) for size, events in self._ring.waiting],
            intake=_kept(vars(self._intake)),
            due=[own - step for own in self._calendar.next_due],
            wants_selection=list(self._wants_selection),
        )

    def go_back_to(self, state: _State) -> None:
        """Restore a state, so that the next step is the one that followed it."""
        tape = self.machine.tape
        step, now = tape.number - 1, tape.num_jobs
        known: dict[int, Event] = {}  # an event that is waited for is over wherever it is awaited

        def events(ago: Iterable[int]) -> list[Any]:
            return [known.setdefault(since, Event(now - since)) for since in ago]

        for own, awaited in zip(self._states, state.segments, strict=True):
            for name, since in zip(_AWAITED, awaited, strict=True):
                setattr(own, name, events(since))
        self._landings.clear()
        for later, segment, num_bytes, computed in state.landings:
            self._landings[step + later].append(Landing(segment, num_bytes, *events(computed)))
        self._ring.waiting = [(size, events(since)) for size, since in state.ring]
        vars(self._intake).update(_kept(state.intake))
        self._calendar.next_due = [step + own for own in state.due]
        self._wants_selection = list(state.wants_selection)

    def _begin(self, step: int) -> list[PlannedBlock]:
        if self.selects_next:
            self.selects_next = False
            self._wants_selection = [True] * len(self._wants_selection)
        return super()._begin(step)


def _kept(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of attributes: lists change in place, and others don't."""
    return {name: list(v) if isinstance(v, list) else v for name, v in values.items()}


def _moments(end: Any, stall: Any) -> tuple[int, int, bool]:
    """Return the operations of a step's end and of its stall's begin, and whether it has gaps.

    Raises:
        CannotRecordError: They are made of something else.
    """
    (last,) = end.terms
    terms = dict(stall.terms) if isinstance(stall, Sum) else {}
    gaps = terms.pop(_GAPS, 0.0)
    begin = next((key for key, factor in terms.items() if factor < 0.0), last)
    if gaps not in (0.0, 1.0) or terms != ({} if begin == last else {last: 1.0, begin: -1.0}):
        raise CannotRecordError("a stall is more than one wait, and those of backward once")
    return last, begin, bool(gaps)
