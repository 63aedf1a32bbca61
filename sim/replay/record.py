"""Record: a schedule as steps of a tape, until its state repeats."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

from sim.replay.arrays import Recorded
from sim.replay.stand_ins import Sum, TapeCosts, TapeMachine
from sim.replay.tape import CannotRecordError, Event
from sim.schedules.schedule import Waits
from sim.schedules.zenflow import EngineSchedule, Landing
from sim.timing.block_plan import PlannedBlock, Structure

_MOST_WINDOWS = 12
"""Number of windows after which a schedule that does not repeat is given up."""
_AWAITED = ("copied", "staging_free", "last_update", "earlier")
"""Fields of a segment's state that are lists of events."""
_GAPS = "gaps"
"""Term of a stall that stands for all waits of backward in its step."""


def record(structure: Structure, phase: int | None) -> Recorded:
    """Return the engine's schedule on one device.

    Args:
        structure: Blocks, windows and queues.
        phase: Steps, modulo a window, behind which a selection is recorded; None records none.

    Raises:
        CannotRecordError: It does what no tape can hold, or does not repeat.
    """
    with _no_collection():
        try:
            return _recorded(structure, phase)
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


def _recorded(structure: Structure, phase: int | None) -> Recorded:
    costs, config = structure.costs, structure.config
    machine, period = TapeMachine(costs), config.update_interval
    schedule = TapedSchedule(machine, costs, config, releases=structure.releases)
    schedule.costs = TapeCosts(costs)  # type: ignore[assignment]
    first = config.full_warm_up_rounds + period
    most = first + _MOST_WINDOWS * period
    states: list[_State] = []
    while len(states) <= first or states[-1] != states[-1 - period]:
        if len(states) == most:
            raise CannotRecordError("the schedule does not repeat")
        states.append(schedule.next_state())
    num_steady = len(states)
    if phase is not None:
        back = (num_steady - phase) % period
        schedule.go_back_to(states[num_steady - back - 1])
        schedule.selects_next = True
        usual = islice(cycle(states[-period:]), period - back, None)
        while schedule.next_state() != next(usual):
            if machine.tape.number > 2 * most:
                raise CannotRecordError("the schedule does not repeat behind a selection")
    return Recorded(machine.tape, num_steady, period, is_cpu=structure.is_cpu)


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
            ring=[(size, ago(events)) for size, events in self._ring.waiting]
            if self._ring
            else [],
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
        if self._ring:
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
