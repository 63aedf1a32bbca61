"""Stand-ins: a machine, costs and a clock with which a schedule runs without taking any time.

A moment and a number of seconds are sums whose terms get their values when a tape is replayed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

from sim.fluid import FlowKind
from sim.lanes import Work
from sim.machine import Machine
from sim.replay.tape import (
    LANES,
    OTHERS,
    PER_UNIT,
    TIMES,
    WORKS,
    CannotRecordError,
    Event,
    Seconds,
    Tape,
)
from sim.timing.costs import StepCosts

_DEVICE = LANES.index("device")
_WORK = {name: WORKS.index(name) for name in ("forward", "backward", "step")}


class Sum:
    """A sum of moments and waits, which have no value while a schedule is recorded."""

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


class _Rate:
    """A rate of the machine; dividing by it records the place of one unit's time."""

    def __init__(self, place: int) -> None:
        self._place = place

    def __rtruediv__(self, count: float) -> Seconds:
        return Seconds({self._place: count})


@dataclass(frozen=True, slots=True)
class _UnknownQuantity:
    """A quantity whose value is known when the tape is replayed."""

    value: Any


class _Instead:
    """An object with other values for some attributes."""

    def __init__(self, usual: Any, others: dict[str, Any]) -> None:
        self._usual = usual
        own = {field.name: getattr(usual, field.name) for field in fields(usual)}
        self.__dict__.update(own | others)  # found at once, unlike what `__getattr__` finds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._usual, name)


def _other(costs: StepCosts, name: str) -> Any:
    """Return one of `OTHERS` in place of its value."""
    place = 2 * len(costs.segments) + OTHERS.index(name)
    return _Rate(place) if name in (*PER_UNIT, "elementwise") else Seconds({place: 1.0})


class TapeCosts(_Instead):
    """Costs whose seconds are known when the tape is replayed."""

    def __init__(self, costs: StepCosts) -> None:
        count = len(costs.segments)
        segments = [
            replace(
                segment,
                forward=Seconds({index: 1.0}),  # type: ignore[arg-type]
                backward=Seconds({count + index: 1.0}),  # type: ignore[arg-type]
            )
            for index, segment in enumerate(costs.segments)
        ]
        others = {
            "elementwise_bandwidth": _other(costs, "elementwise"),
            "launching_seconds": _other(costs, "launching"),
            "segments": segments,
        }
        super().__init__(costs, {**others, "num_params": costs.num_params})


class _TapeEnvironment:
    """A clock whose moments are sums on the tape."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape

    @property
    def now(self) -> Sum:
        """The present: the end of the last operation."""
        return Sum({self._tape.num_operations - 1: 1.0})

    def timeout(self, delay: Seconds) -> Event:
        event = Event(-1)
        event.sleep = delay
        return event


class _TapeLane:
    """A lane that only records."""

    def __init__(self, tape: Tape, name: str) -> None:
        self._tape = tape
        self._lane, self._work = LANES.index(name), WORKS.index(name)

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
        steps = work.steps if isinstance(work, _HostWork) else 0.0
        return self._tape.submit(
            self._lane, self._work, work.seconds, work.num_bytes, steps, work.counted, step,
            deadline or step, rank, after,  # only the host goes by deadlines
        )  # fmt: skip


@dataclass(slots=True, kw_only=True)
class _HostWork(Work):
    """Work of the host, whose rate its arithmetic may bound."""

    steps: float = 0.0


class TapeMachine(Machine):
    """A machine whose lanes record."""

    def __init__(self, costs: StepCosts) -> None:
        super().__init__(costs.hardware, keeps_spans=False)
        self.tape = Tape()
        self.env: Any = _TapeEnvironment(self.tape)
        self._together: dict[str, Any] = {}
        """Seconds of all segments' passes by name, as one sum."""
        for name in LANES[1:]:
            setattr(self, name, _TapeLane(self.tape, name))
        self.device = self.fabric = None  # type: ignore[assignment]
        self.nvme_read = self.nvme_write = None  # type: ignore[assignment]
        hardware = costs.hardware
        quantities = {name: _UnknownQuantity(_other(costs, name)) for name in (*PER_UNIT, *TIMES)}
        latency = {"latency": _UnknownQuantity(_other(costs, "latency"))}
        self.hardware: Any = _Instead(
            hardware,
            {
                "overheads": _Instead(hardware.overheads, quantities),
                "link": _Instead(hardware.link, latency),
            },
        )
        self.pack_rate = quantities["pack_bandwidth"].value
        self.unpack_rate = quantities["unpack_bandwidth"].value
        self.copy_seconds = quantities["copy"].value + latency["latency"].value

    def compute(self, name: str, seconds: Any, step: int, after: Iterable[Any] = ()) -> Any:
        """Queue work on the device; return the event of its end.

        Raises:
            CannotRecordError: It is neither a pass nor the optimizer's step.
        """
        work = _WORK.get(name)
        if work is None:
            raise CannotRecordError(f"the device's {name} is no part of a tape")
        return self.tape.submit(_DEVICE, work, seconds, 0.0, 0.0, 0.0, step, step, 0, after)

    def compute_all(self, name: str, seconds: Iterable[float], step: int) -> Any:
        """Queue works on the device as one, as nobody waits for any but the last."""
        if name not in self._together:
            self._together[name] = sum(seconds)
        return self.compute(name, self._together[name], step)

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
