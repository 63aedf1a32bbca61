"""Lanes of bars that the page draws of a trace, from our traces and from other profilers' ones.

A trace of ours is read back exactly. Another one, in Chrome's trace event format (PyTorch's
profiler writes it), gets a lane for each thread and stream, with calls inside calls in rows.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.traces.compare import Trace, whole_steps
from zenflow.errors import ConfigError
from zenflow.trace.timeline import Span, Timeline

_GZIP = b"\x1f\x8b"
_STEP_SPANS = "ProfilerStep#"
_NOT_WORK = ("Trace", "overhead")
"""Categories of events that tell of the profiler itself."""
HOW_TO_GET = (
    "a trace is what `zenflow train` leaves as trace.json, what `zenflow simulate --trace` "
    "writes, or what torch.profiler's export_chrome_trace does, as .json or .json.gz"
)


@dataclass(frozen=True, slots=True)
class Bar:
    """A span, or several short ones, in its place: seconds from the trace's start, and a row."""

    start: float
    end: float
    name: str
    step: int
    """Step that caused it, or in which it began in another profiler's trace; 0 if unknown."""
    num_bytes: int
    row: int
    is_stall: bool
    busy_seconds: float
    """The spans' own seconds: the bar's length, unless it stands for several."""
    count: int = 1
    """Spans that the bar stands for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """Spans of one lane, in order of starts."""

    name: str
    bars: Sequence[Bar]
    busy_seconds: float
    """Work, what overlaps counted once, waits not at all."""

    @property
    def num_bytes(self) -> int:
        """Bytes moved."""
        return sum(bar.num_bytes for bar in self.bars)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceView:
    """A trace's lanes and figures, whole: nothing is left out yet."""

    path: str
    source: str
    """Kind of the times: "measured, emulated link", "simulated", "PyTorch profiler"."""
    seconds: float
    """Seconds from the first start to the last end."""
    lanes: Sequence[Lane]
    step_starts: Mapping[int, float]
    step_seconds: float | None
    """Mean over whole steps, selections included; None where the trace knows no steps."""
    stall_fraction: float | None
    """Share of whole steps in which the device waited; None where the trace knows no waits."""
    bytes_per_step: Mapping[str, float]
    """Bytes of the lanes d2h and h2d, where the trace has them."""
    metadata: Mapping[str, Any]

    @property
    def num_spans(self) -> int:
        """Bars in all lanes."""
        return sum(len(lane.bars) for lane in self.lanes)


def read_view(path: Path) -> TraceView:
    """Return the lanes of a trace file, whoever wrote it.

    Raises:
        ConfigError: It can't be read, is no trace, or has no spans.
    """
    content = _parse(path)
    if isinstance(content, dict) and "zenflow" in content:
        try:
            timeline = Timeline.from_chrome_trace(content)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{path} has the mark of zenflow's traces, but can't be read as one "
                f"({type(error).__name__}: {error}): write it anew; {HOW_TO_GET}"
            ) from error
        if not timeline.spans:
            raise ConfigError(
                f"{path} has no spans to draw: record some with timeline_steps "
                "(--timeline-steps) above 0"
            )
        return view_of(timeline, str(path))
    events = content.get("traceEvents") if isinstance(content, dict) else content
    if not isinstance(events, list):
        raise ConfigError(
            f"{path} is JSON, but no trace: it lacks a list traceEvents; {HOW_TO_GET}"
        )
    is_kineto = isinstance(content, dict) and "deviceProperties" in content
    return _foreign_view(events, str(path), "PyTorch profiler" if is_kineto else "source unknown")


def view_of(timeline: Timeline, path: str) -> TraceView:
    """Return the view of a timeline of ours."""
    trace = Trace(path=path, timeline=timeline)
    side = whole_steps(trace)
    of_steps, origin = side.timeline, timeline.start
    return TraceView(
        path=path,
        source=trace.label,
        seconds=timeline.makespan,
        lanes=[
            _lane(lane, [span for span in timeline.spans if span.lane == lane], origin)
            for lane in timeline.lanes
        ],
        step_starts={step: start - origin for step, start in side.starts.items()},
        step_seconds=side.step_seconds,
        stall_fraction=side.stall_fraction if side.step_seconds else None,
        bytes_per_step={
            lane: of_steps.num_bytes(lane) / side.num_steps
            for lane in ("d2h", "h2d")
            if lane in timeline.lanes
        },
        metadata=timeline.metadata,
    )


def _parse(path: Path) -> Any:
    try:
        content = path.read_bytes()
        if content[:2] == _GZIP:
            content = gzip.decompress(content)
        return json.loads(content)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path} can't be read ({error}): check the file") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON ({error}), so no trace: {HOW_TO_GET}") from error


def _lane(name: str, spans: Sequence[Span], origin: float) -> Lane:
    """Return bars in rows: overlapping ones apart, waits over the work that they interrupt."""
    free_from: list[float] = []
    bars = []
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        row = 0 if span.is_stall else _take_row(free_from, span.start, span.end)
        bars.append(
            Bar(
                span.start - origin, span.end - origin, span.name, span.step, span.num_bytes,
                row, span.is_stall, span.end - span.start,
            )
        )  # fmt: skip
    busy = Timeline(tuple(spans)).busy(spans[0].lane)
    return Lane(name=name, bars=bars, busy_seconds=busy)


def _take_row(free_from: list[float], start: float, end: float) -> int:
    row = next((row for row, free in enumerate(free_from) if free <= start), len(free_from))
    free_from[row : row + 1] = [end]
    return row


def _foreign_view(events: Sequence[Any], path: str, source: str) -> TraceView:
    """Return the view of a trace in Chrome's trace event format; its times are microseconds."""
    events = [event for event in events if isinstance(event, dict)]
    try:
        complete = sorted(_complete(events), key=lambda event: event["ts"])
        names = _track_names(events)
        return _view_of_events(complete, names, path, source)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{path} has events that are not of Chrome's trace event format "
            f"({type(error).__name__}: {error}): {HOW_TO_GET}"
        ) from error


def _view_of_events(
    complete: Sequence[Mapping[str, Any]], names: Mapping[Any, str], path: str, source: str
) -> TraceView:
    if not complete:
        raise ConfigError(
            f"{path} has no event with a duration (phase X, or B and E), so nothing can be drawn: "
            f"{HOW_TO_GET}"
        )
    origin = min(event["ts"] for event in complete)
    steps = {
        int(event["name"].removeprefix(_STEP_SPANS)): event
        for event in complete
        if event["name"].startswith(_STEP_SPANS) and event.get("cat") != "gpu_user_annotation"
    }
    starts = {step: (event["ts"] - origin) / 1e6 for step, event in steps.items()}
    tracks: dict[Any, list[Span]] = defaultdict(list)
    for event in complete:
        start = (event["ts"] - origin) / 1e6
        args = event.get("args") or {}
        num_bytes = args.get("bytes", args.get("Bytes", 0))
        step = max((s for s, first in starts.items() if first <= start), default=0)
        tracks[event["track"]].append(
            Span(
                "", event["name"], start, start + max(event["dur"], 0) / 1e6, step,
                int(num_bytes) if isinstance(num_bytes, int | float) else 0,
            )
        )  # fmt: skip
    lanes = [
        _lane(names.get(key, f"process {key[0]}, thread {key[1]}"), spans, 0.0)
        for key, spans in sorted(tracks.items(), key=lambda item: tuple(map(str, item[0])))
    ]
    return TraceView(
        path=path,
        source=source,
        seconds=max(bar.end for lane in lanes for bar in lane.bars),
        lanes=lanes,
        step_starts=starts,
        step_seconds=fmean(event["dur"] for event in steps.values()) / 1e6 if steps else None,
        stall_fraction=None,
        bytes_per_step={},
        metadata={},
    )


def _complete(events: Sequence[Mapping[str, Any]]) -> Iterable[dict[str, Any]]:
    """Yield events with a duration: those of phase X, and pairs of B and E as such."""
    begun: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        phase, track = event.get("ph"), (event.get("pid", 0), event.get("tid", 0))
        if phase == "B":
            begun[track].append(event)
            continue
        first, seconds = event, event.get("dur", 0)
        if phase == "E" and begun[track]:
            first = begun[track].pop()
            seconds = float(event["ts"]) - float(first["ts"])
        elif phase != "X" or event.get("cat") in _NOT_WORK:
            continue
        yield {**first, "name": str(first["name"]), "ts": float(first["ts"]),
               "dur": float(seconds), "track": track}  # fmt: skip


def _track_names(events: Sequence[Mapping[str, Any]]) -> dict[Any, str]:
    """Return the names of threads, with their process where there are several."""
    processes, threads = {}, {}
    for event in events:
        if event.get("ph") != "M":
            continue
        if event.get("name") == "process_name":
            processes[event["pid"]] = str(event["args"]["name"]).strip()
        elif event.get("name") == "thread_name":
            threads[event["pid"], event["tid"]] = str(event["args"]["name"]).strip()
    several = len({pid for pid, _ in threads}) > 1
    return {
        (pid, tid): f"{processes.get(pid, pid)}: {name}" if several else name
        for (pid, tid), name in threads.items()
    }
