"""Two traces side by side: the same steps of both, and per-step figures of each.

Either trace may be measured by the engine or predicted by the simulator. Importing this loads
neither torch nor matplotlib.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments.traces.facts import TraceFacts, differences
from zenflow.errors import ConfigError
from zenflow.trace.timeline import STALL_PREFIX, Timeline

TRACE_FILES = ("trace.json", "trace.json.gz")
"""Names of a run directory's trace."""

UNITS = {
    "step": "s",
    "stall": "s",
    "busy": "s",
    "share": "1",
    "bytes": "B",
    "rate": "B/s",
    "span": "s",
}
"""The groups of figures in the order in which a table shows them, with their units."""

_HOW_TO_GET = "`zenflow train --out RUN` leaves one in RUN, and Timeline.write writes one"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A timeline and where it was read."""

    path: str
    timeline: Timeline

    @property
    def label(self) -> str:
        """Kind of the numbers: "measured, emulated link", "simulated"."""
        metadata = self.timeline.metadata
        # Only the engine says whether its link is emulated without saying who measured.
        guess = "measured" if "emulated_link" in metadata else "source unknown"
        kinds = [str(metadata.get("source", guess))]
        if metadata.get("emulated_link"):
            kinds.append("emulated link")
        return ", ".join(kinds)

    @property
    def facts(self) -> TraceFacts:
        """Model, batch and machine of the side's steps."""
        return TraceFacts.read(self.timeline.metadata)

    @property
    def selection_seconds(self) -> float:
        """Seconds that selections of columns add to a step on average, if no step here has one.

        A simulated trace holds the steps between two selections, and states the seconds that
        selections add. The steps of a measured trace are as they were.
        """
        found = self.timeline.metadata.get("selection_seconds", 0.0)
        return float(found) if isinstance(found, int | float) else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Whole steps of one trace."""

    trace: Trace
    starts: Mapping[int, float]
    """Start of each step, in seconds of the trace's clock; in order."""
    end: float
    """End of the last step, seconds."""

    @property
    def timeline(self) -> Timeline:
        """All that these steps caused, whenever it ran: a cut would lose a late copy's bytes."""
        return self.trace.timeline.steps(min(self.starts), max(self.starts))

    @property
    def window(self) -> Timeline:
        """Spans from the first step's start to the last one's end, cut there."""
        return self.trace.timeline.between(self.start, self.end)

    @property
    def start(self) -> float:
        """Start of the first step, seconds."""
        return min(self.starts.values())

    @property
    def num_steps(self) -> int:
        """Number of steps of this side."""
        return len(self.starts)

    @property
    def step_seconds(self) -> float:
        """Mean length of a step, selections of columns included."""
        return (self.end - self.start) / self.num_steps + self.trace.selection_seconds

    @property
    def stalls(self) -> dict[str, float]:
        """Mean seconds of a step in which the device waited, by cause."""
        found = {c: s / self.num_steps for c, s in self.timeline.stalls().items()}
        if self.trace.selection_seconds:
            found["select"] = found.get("select", 0.0) + self.trace.selection_seconds
        return found

    @property
    def stall_fraction(self) -> float:
        """Share of a step in which the device waited."""
        return sum(self.stalls.values()) / self.step_seconds if self.step_seconds else 0.0

    @property
    def steps(self) -> str:
        """The steps in words."""
        first, last = min(self.starts), max(self.starts)
        if self.num_steps == 1:
            return f"step {first}"
        return f"steps {first} to {last} ({self.num_steps})"

    @property
    def averaged(self) -> str:
        """Steps that the numbers are means over, in words."""
        if self.trace.selection_seconds:
            return f"{self.steps}, selections of columns spread over all steps"
        return self.steps

    def only(self, steps: Collection[int]) -> Side:
        """Return some of the steps, which lie together."""
        kept = {step: start for step, start in self.starts.items() if step in steps}
        later = [start for start in self.starts.values() if start > max(kept.values())]
        return Side(trace=self.trace, starts=kept, end=min(later, default=self.end))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure of both traces, in SI units; None where a trace has none."""

    group: str
    """A key of ``UNITS``."""
    lane: str
    name: str
    """Cause of a stall (empty: of all) or name of a span; else empty."""
    unit: str
    a: float | None
    b: float | None

    @property
    def difference(self) -> float | None:
        """B less A."""
        return None if self.a is None or self.b is None else self.b - self.a

    @property
    def ratio(self) -> float | None:
        """B over A; None where A is nothing."""
        return None if not self.a or self.b is None else self.b / self.a

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready record."""
        return {**asdict(self), "difference": self.difference, "ratio": self.ratio}


def load(path: Path) -> Trace:
    """Return the trace in a file or in a run's directory.

    Raises:
        ConfigError: There is none, or it is not one of ours, or it has no spans.
    """
    file = _find_trace(path)
    try:
        timeline = Timeline.read(file)
    except (
        OSError, EOFError, zlib.error, ValueError, LookupError, TypeError, RecursionError,
    ) as error:  # fmt: skip
        raise ConfigError(
            f"a trace must be one that Timeline.write wrote, but {file} can't be read as one "
            f"({type(error).__name__}: {error}): {_HOW_TO_GET}"
        ) from error
    if not timeline.spans:
        raise ConfigError(
            f"a trace needs spans to be compared, but {file} has none: record some with "
            "timeline_steps (--timeline-steps) above 0"
        )
    return Trace(path=str(path), timeline=timeline)


def align(a: Trace, b: Trace, steps: tuple[int, int] | None = None) -> tuple[Side, Side]:
    """Return the whole steps that both have; if they share no number, all whole steps of each.

    Args:
        a: One trace.
        b: The other.
        steps: First and last step, included, to compare no others.

    Raises:
        ConfigError: No lane is in both, or a trace has none of the steps asked for.
    """
    lanes_a, lanes_b = a.timeline.lanes, b.timeline.lanes
    if not set(lanes_a) & set(lanes_b):
        raise ConfigError(
            f"traces must share a lane to be compared, but {a.path} has {', '.join(lanes_a)} and "
            f"{b.path} has {', '.join(lanes_b)}: name the lanes as zenflow.LANES does"
        )
    sides = whole_steps(a), whole_steps(b)
    if steps is not None:
        return _within(sides[0], *steps), _within(sides[1], *steps)
    common = sides[0].starts.keys() & sides[1].starts.keys()
    if not common:
        return sides
    first, last = min(common), max(common)
    return _within(sides[0], first, last), _within(sides[1], first, last)


def last_steps(trace: Trace, count: int) -> Side:
    """Return the last whole steps of a trace, so many if there are."""
    side = whole_steps(trace)
    chosen = [*side.starts][-count:]
    return _within(side, chosen[0], chosen[-1])


def whole_steps(trace: Trace) -> Side:
    """Return the steps of a trace whose end is known.

    A step starts with its first span on the device, a forward, and ends where the next starts.
    So the last recorded step is only the end of the one before, unless it is the only one, or
    the trace says where it ends.
    """
    spans = trace.timeline.spans
    starts: dict[int, float] = {}
    for span in [span for span in spans if span.lane == "device"] or spans:
        starts[span.step] = min(span.start, starts.get(span.step, span.start))
    ordered = dict(sorted(starts.items(), key=lambda item: item[1]))
    told = trace.timeline.metadata.get("end_seconds")
    if isinstance(told, int | float) and told >= max(ordered.values()):
        return Side(trace=trace, starts=ordered, end=float(told))
    if len(ordered) == 1:
        return Side(trace=trace, starts=ordered, end=trace.timeline.end)
    _, end = ordered.popitem()
    return Side(trace=trace, starts=ordered, end=end)


def compare_sides(a: Side, b: Side) -> list[Row]:
    """Return every figure of both: seconds and bytes are per step, shares are of the time.

    A lane or span that a trace lacks counts 0 there; a rate of nothing is None.
    """
    lanes = Timeline((*a.timeline.spans, *b.timeline.spans)).lanes
    found = _figures(a, lanes), _figures(b, lanes)
    groups, places = list(UNITS), ["", *lanes]
    keys = sorted(
        {*found[0], *found[1]},
        key=lambda key: (groups.index(key[0]), places.index(key[1]), key[2]),
    )
    rows = []
    for group, lane, name in keys:
        missing = None if group == "rate" else 0.0
        a_value, b_value = (figures.get((group, lane, name), missing) for figures in found)
        rows.append(
            Row(group=group, lane=lane, name=name, unit=UNITS[group], a=a_value, b=b_value)
        )
    return rows


def warnings(a: Trace, b: Trace) -> list[str]:
    """Return in sentences why a difference of the two may not be what one is after."""
    found = differences(a.facts, b.facts)
    if a.label != b.label:
        found.insert(0, f"A is {a.label}, and B is {b.label}")
    return found


def to_json(a: Side, b: Side, rows: Sequence[Row]) -> dict[str, Any]:
    """Return the comparison as a JSON-ready record; times are seconds, traffic is bytes."""
    sides: dict[str, Any] = {name: _side_record(side) for name, side in (("a", a), ("b", b))}
    sides["warnings"] = warnings(a.trace, b.trace)
    return {**sides, "rows": [row.to_dict() for row in rows]}


def _find_trace(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise ConfigError(
            f"a trace must be a file or a run's directory, but {path} doesn't exist: {_HOW_TO_GET}"
        )
    for name in TRACE_FILES:
        if (path / name).is_file():
            return path / name
    runs = sorted(inner.parent.name for name in TRACE_FILES for inner in path.glob(f"*/{name}"))
    remedy = f"name one of its runs: {', '.join(runs)}" if runs else _HOW_TO_GET
    raise ConfigError(f"a run's directory must hold a trace.json, but {path} doesn't: {remedy}")


def _within(side: Side, first: int, last: int) -> Side:
    """Return the steps that lie within two numbers."""
    kept = {step for step in side.starts if first <= step <= last}
    if not kept:
        raise ConfigError(
            f"steps must be in both traces, but {side.trace.path} has none of {first} to {last}: "
            f"its whole steps are {min(side.starts)} to {max(side.starts)}"
        )
    return side.only(kept)


def _figures(side: Side, lanes: Sequence[str]) -> dict[tuple[str, str, str], float | None]:
    """Return the side's figures by (group, lane, name)."""
    line, steps = side.timeline, side.num_steps
    busy = {lane: line.busy(lane) if lane in line.lanes else 0.0 for lane in lanes}
    moved = {lane: line.num_bytes(lane) for lane in line.lanes}
    found: dict[tuple[str, str, str], float | None] = {
        ("step", "", ""): side.step_seconds,
        ("stall", "device", ""): sum(side.stalls.values()),
    }
    found |= {("stall", "device", cause): seconds for cause, seconds in side.stalls.items()}
    found |= {("busy", lane, ""): busy[lane] / steps for lane in lanes}
    found |= {("share", lane, ""): _over(busy[lane] / steps, side.step_seconds) for lane in lanes}
    for lane, num_bytes in moved.items():
        if num_bytes:
            found["bytes", lane, ""] = num_bytes / steps
            found["rate", lane, ""] = _over(num_bytes, busy[lane])
    for (lane, name), seconds in line.by_name().items():
        if not (lane == "device" and name.startswith(STALL_PREFIX)):  # those have rows already
            found["span", lane, name] = seconds / steps
    return found


def _over(value: float, base: float) -> float | None:
    return value / base if base else None


def _side_record(side: Side) -> dict[str, Any]:
    return {
        "path": side.trace.path,
        "label": side.trace.label,
        "metadata": dict(side.trace.timeline.metadata),
        "first_step": min(side.starts),
        "last_step": max(side.starts),
        "num_steps": side.num_steps,
        "seconds": side.end - side.start,
    }
