"""Windows: parts of a step on the host, from the first marked step to the last.

Steps are marked by the profiler's own `step()`. Backward is what autograd's engine evaluates,
forward what ran before it with a number of autograd's sequence, and the optimizer's step carries
its annotation. Windows follow one another without gaps: what is none of these is *rest*.
"""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from sim.traced.events import HOW, Event, KinetoTrace
from zenflow.errors import ConfigError
from zenflow.trace.intervals import Interval, merge

Part = Literal["forward", "backward", "optimizer", "rest"]

_STEP = re.compile(r"ProfilerStep#(\d+)")
_EVALUATION = "autograd::engine::evaluate_function"
OPTIMIZER = "Optimizer.step#"
"""Begin of the names of optimizers' steps; their class follows."""
SEQUENCE = "Sequence number"
"""Argument that operations have of which autograd keeps something."""


@dataclass(frozen=True, slots=True)
class Window:
    """One part of one step on the host."""

    part: Part
    step: int
    """Index of its step among those that are marked."""
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class _Span:
    start: float
    end: float


def windows_of(trace: KinetoTrace) -> list[Window]:
    """Return the windows of all marked steps, in order and without gaps.

    Raises:
        ConfigError: Fewer than two steps are marked, or one has no backward.
    """
    steps = _steps(trace)
    evaluations = _outermost(e for e in trace.events if e.name.startswith(_EVALUATION))
    thread = steps[0].thread
    own = [event for event in trace.events if event.thread == thread]
    optimizers = _outermost(e for e in own if e.name.startswith(OPTIMIZER))
    forwards = [e for e in own if e.category == "cpu_op" and SEQUENCE in e.arguments]
    windows: list[Window] = []
    ends = [*(step.start for step in steps[1:]), steps[-1].end]
    for index, (step, end) in enumerate(zip(steps, ends, strict=True)):
        within = _Span(step.start, end)
        found = list(
            _parts(
                _inside(evaluations, within),
                _inside(optimizers, within),
                [e.start for e in forwards if step.start <= e.start < end],
            )
        )
        if not any(part == "backward" for part, _ in found):
            raise ConfigError(
                f"{trace.path}: {step.name} has no backward, so it is no step of training: "
                "profile the loop that calls backward(), on the CPU's activities as well"
            )
        windows += _tiled(found, within, index)
    return windows


def _steps(trace: KinetoTrace) -> list[Event]:
    """Return the marks of steps in order.

    Raises:
        ConfigError: There are fewer than two.
    """
    marks = [
        event for event in trace.events
        if event.category == "user_annotation" and _STEP.fullmatch(event.name)
    ]  # fmt: skip
    if not marks:
        raise ConfigError(f"{trace.path} marks no steps (ProfilerStep#): {HOW}")
    steps = sorted(marks, key=lambda event: event.start)
    if len(steps) < 2:
        raise ConfigError(
            f"{trace.path} marks one step only, and the first one starts the clock: trace at "
            "least two, better four (schedule(wait=1, warmup=2, active=4))"
        )
    return steps


def _outermost(events: Iterable[Event]) -> list[_Span]:
    """Return spans that no earlier one of them contains, whatever their threads."""
    found: list[_Span] = []
    for event in events:
        if not found or event.start >= found[-1].end:
            found.append(_Span(event.start, event.end))
        elif event.end > found[-1].end:  # another thread's
            found[-1] = _Span(found[-1].start, event.end)
    return found


def _inside(spans: Iterable[_Span], step: _Span) -> list[_Span]:
    return [span for span in spans if step.start <= span.start < step.end]


def _parts(
    evaluations: Sequence[_Span], optimizers: Sequence[_Span], forwards: Sequence[float]
) -> Iterator[tuple[Part, _Span]]:
    """Yield the parts of one step: evaluations with no forward between them are one backward."""
    inside = merge((span.start, span.end) for span in (*evaluations, *optimizers))
    outside = [start for start in forwards if not covers(inside, start)]
    last = float("-inf")
    while evaluations:
        begin = evaluations[0].start
        before = [start for start in outside if last <= start < begin]
        after = min((start for start in outside if start >= begin), default=float("inf"))
        group = [span for span in evaluations if span.start < after]
        if before:
            # An optimizer that ran in between is none of the forward.
            since = max((span.end for span in optimizers if span.end <= begin), default=last)
            start = min((each for each in before if each >= since), default=begin)
            yield "forward", _Span(start, begin)
        yield "backward", _Span(begin, group[-1].end)
        last, evaluations = group[-1].end, evaluations[len(group) :]
    for span in optimizers:
        yield "optimizer", span


def covers(merged: Sequence[Interval], moment: float) -> bool:
    """Return whether a moment is in one of these intervals, which are in order and apart."""
    index = bisect.bisect_right(merged, (moment, math.inf)) - 1
    return index >= 0 and moment < merged[index][1]


def _tiled(found: Iterable[tuple[Part, _Span]], step: _Span, index: int) -> Iterator[Window]:
    """Yield the parts of a step in order, with rest wherever there is none."""
    now = step.start
    for part, span in sorted(found, key=lambda item: item[1].start):
        if span.start > now:
            yield Window("rest", index, now, span.start)
        yield Window(part, index, max(now, span.start), max(now, span.end))
        now = max(now, span.end)
    if now < step.end:
        yield Window("rest", index, now, step.end)
