"""Timeline: spans of work on lanes, queried, compared, and written as a Chrome trace."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from zenflow.trace import chrome
from zenflow.trace.intervals import Interval, intersect, length, merge, subtract
from zenflow.trace.span import LANES, STALL_PREFIX, Span, lane_order, lanes_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike

__all__ = ["LANES", "STALL_PREFIX", "Comparison", "ComparisonRow", "Span", "Timeline", "compare"]


@dataclass(frozen=True)
class Timeline:
    """Spans with facts about their source.

    >>> forward, copy = Span("device", "forward", 0.0, 2.0, 1), Span("d2h", "grads", 1.0, 4.0, 1)
    >>> line = Timeline((forward, copy))
    >>> line.makespan, line.busy("device"), line.idle("device"), line.overlap("device", "d2h")
    (4.0, 2.0, 2.0, 1.0)
    """

    spans: tuple[Span, ...] = ()
    """Spans in any order, on one clock."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """JSON-ready facts, such as ``source`` (measured or simulated) and ``emulated_link``."""

    def __post_init__(self) -> None:
        """Take any iterable of spans."""
        object.__setattr__(self, "spans", tuple(self.spans))

    @property
    def lanes(self) -> tuple[str, ...]:
        """Lanes with spans: those of ``LANES`` first, then others by name."""
        return lanes_of(self.spans)

    @property
    def start(self) -> float:
        """Start of the first span, in seconds; 0 when empty."""
        return min((span.start for span in self.spans), default=0.0)

    @property
    def end(self) -> float:
        """End of the last span, in seconds; 0 when empty."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last end."""
        return self.end - self.start

    def busy(self, lane: str) -> float:
        """Return the seconds in which the lane worked: overlaps once, stalls not at all.

        Raises:
            ValueError: No such lane.
        """
        return length(self._work(lane))

    def idle(self, lane: str) -> float:
        """Return the seconds of the makespan in which the lane did not work."""
        return self.makespan - self.busy(lane)

    def overlap(self, lane_a: str, lane_b: str) -> float:
        """Return the seconds in which both lanes worked."""
        return length(intersect(self._work(lane_a), self._work(lane_b)))

    def stalls(self, lane: str = "device") -> dict[str, float]:
        """Return the seconds in which the lane waited, by cause; empty without a stall."""
        by_cause: dict[str, list[Interval]] = defaultdict(list)
        for span in self._on(lane):
            if span.is_stall:
                by_cause[span.name.removeprefix(STALL_PREFIX)].append((span.start, span.end))
        return {cause: length(merge(waits)) for cause, waits in sorted(by_cause.items())}

    def num_bytes(self, lane: str) -> int:
        """Return the bytes that the lane's spans moved."""
        return sum(span.num_bytes for span in self._on(lane))

    def by_name(self) -> dict[tuple[str, str], float]:
        """Return the seconds of every (lane, name), each one's own overlaps counted once."""
        times: dict[tuple[str, str], list[Interval]] = defaultdict(list)
        for span in self.spans:
            times[span.lane, span.name].append((span.start, span.end))
        keys = sorted(times, key=lambda key: (lane_order(key[0]), key[1]))
        return {key: length(merge(times[key])) for key in keys}

    def between(self, start: float, end: float) -> Timeline:
        """Return the spans cut to [start, end]; their bytes are cut in proportion."""
        cut = []
        for span in self.spans:
            first, last = max(span.start, start), min(span.end, end)
            if first < last:
                share = (last - first) / span.seconds
                num_bytes = round(span.num_bytes * share)
                cut.append(replace(span, start=first, end=last, num_bytes=num_bytes))
        return replace(self, spans=tuple(cut))

    def steps(self, first: int, last: int) -> Timeline:
        """Return the whole spans that steps ``first`` to ``last`` (included) caused."""
        return replace(self, spans=tuple(s for s in self.spans if first <= s.step <= last))

    def to_chrome_trace(self) -> dict[str, Any]:
        """Return a JSON-ready trace in Kineto's schema: see ``zenflow.trace.chrome``."""
        return chrome.to_chrome_trace(self.spans, self.metadata)

    @classmethod
    def from_chrome_trace(cls, trace: Mapping[str, Any]) -> Timeline:
        """Return the timeline that ``to_chrome_trace`` exported, equal to the original.

        Raises:
            ValueError: The trace isn't one of ours.
        """
        return cls(*chrome.from_chrome_trace(trace))

    def write(self, path: str | PathLike[str]) -> None:
        """Write the Chrome trace, whole or not at all; a name in ``.gz`` is compressed.

        Raises:
            OSError: The file can't be written; an earlier one of this name is untouched.
        """
        chrome.write_trace(self.spans, self.metadata, path)

    @classmethod
    def read(cls, path: str | PathLike[str]) -> Timeline:
        """Return the timeline that ``write`` wrote.

        Raises:
            ValueError: The file isn't one of ours.
        """
        return cls(*chrome.read_trace(path))

    def _on(self, lane: str) -> list[Span]:
        spans = [span for span in self.spans if span.lane == lane]
        if not spans and lane not in LANES:
            known = ", ".join(dict.fromkeys((*LANES, *self.lanes)))
            raise ValueError(f"lane must be one of {known}, got {lane!r}: name a lane that exists")
        return spans

    def _work(self, lane: str) -> list[Interval]:
        spans = self._on(lane)
        work = merge((span.start, span.end) for span in spans if not span.is_stall)
        waits = merge((span.start, span.end) for span in spans if span.is_stall)
        return subtract(work, waits)  # a wait inside a "step" span is not work


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """Seconds of one (lane, name) in two timelines."""

    lane: str
    """Lane of both sides."""
    name: str
    """Name of the spans."""
    measured: float
    """Seconds measured."""
    predicted: float
    """Seconds predicted."""

    @property
    def ratio(self) -> float:
        """Predicted over measured; NaN where nothing was measured."""
        return self.predicted / self.measured if self.measured else math.nan


@dataclass(frozen=True, slots=True)
class Comparison:
    """A prediction beside its measurement; as a string, a table."""

    rows: tuple[ComparisonRow, ...]
    """Rows by lane and name; the last is the makespan."""

    def __str__(self) -> str:
        """Return the table: seconds, and predicted over measured."""
        lines = [f"{'lane':<8}{'span':<16}{'measured s':>12}{'predicted s':>13}{'ratio':>8}"]
        lines += [
            f"{row.lane:<8}{row.name:<16}{row.measured:>12.6g}{row.predicted:>13.6g}"
            f"{row.ratio:>8.3f}"
            for row in self.rows
        ]
        return "\n".join(lines)


def compare(measured: Timeline, predicted: Timeline) -> Comparison:
    """Return the seconds of every (lane, span name) in both, and of both makespans.

    Give both the same steps (``Timeline.steps``): seconds are totals, not per step. A name that
    one side lacks counts 0 there. The last row is the makespan, under the lane "all".
    """
    left, right = measured.by_name(), predicted.by_name()
    keys = sorted({*left, *right}, key=lambda key: (lane_order(key[0]), key[1]))
    rows = [ComparisonRow(*key, left.get(key, 0.0), right.get(key, 0.0)) for key in keys]
    total = ComparisonRow("all", "makespan", measured.makespan, predicted.makespan)
    return Comparison((*rows, total))
