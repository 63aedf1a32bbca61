"""Spans to Chrome trace JSON and back, in the schema that PyTorch's Kineto writes.

So Perfetto, chrome://tracing and Holistic Trace Analysis (HTA) read a measured and a predicted
timeline alike. What HTA looks at decides the form: kernels and memcpys carry a ``stream``,
memcpys are named "Memcpy DtoH ..." and carry bytes and bandwidth, steps are ``ProfilerStep#N``
spans of the host thread, and a ``correlation`` ties kernels and memcpys to the step that launched
them. Each event's ``args`` keep the span itself, so reading back is exact.
"""

from __future__ import annotations

import gzip
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zenflow.errors import naming_file
from zenflow.trace.intervals import Interval, merge, subtract
from zenflow.trace.span import Span, lanes_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from os import PathLike

DEVICE_PID = 0
HOST_PID = 1
_STEP_THREAD = 0  # the training loop's: steps, and the waits inside them
_THREADS_PER_LANE = 100
_MICROSECONDS = 1e6
_FORMAT_VERSION = 1
_FIRST_CORRELATION = 1 << 20  # HTA puts rows' numbers in their place, in the integers they fit in


@dataclass(frozen=True, slots=True)
class _Track:
    """A lane's place in a trace: process and thread, and the names that Kineto's readers know."""

    pid: int
    thread: int
    category: str
    label: str
    event_name: str | None = None  # None: the span's own


_TRACKS = {
    "device": _Track(DEVICE_PID, 7, "kernel", "stream 7 compute"),
    "d2h": _Track(DEVICE_PID, 20, "gpu_memcpy", "stream 20 d2h", "Memcpy DtoH (Device -> Pinned)"),
    "h2d": _Track(DEVICE_PID, 21, "gpu_memcpy", "stream 21 h2d", "Memcpy HtoD (Pinned -> Device)"),
    "weights d2h": _Track(
        DEVICE_PID, 22, "gpu_memcpy", "stream 22 weights d2h", "Memcpy DtoH (Device -> Pinned)"
    ),
    "weights h2d": _Track(
        DEVICE_PID, 23, "gpu_memcpy", "stream 23 weights h2d", "Memcpy HtoD (Pinned -> Device)"
    ),
    "host": _Track(HOST_PID, 1, "cpu_op", "host update"),
}
_STALL_TRACK = _Track(HOST_PID, _STEP_THREAD, "user_annotation", "training loop")
_FIRST_OTHER_THREAD = 2


def to_chrome_trace(spans: Sequence[Span], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return a timeline's spans as a JSON-ready Chrome trace; times in it are microseconds.

    ``metadata["device"]`` names the device's process, and ``metadata["source"]`` (measured or
    simulated) and ``metadata["emulated_link"]`` label it, so that no reader mixes them up.
    """
    device = str(metadata.get("device", "device"))
    starts = _step_starts(spans)
    events = [
        *_process_events(device, metadata),
        *_step_events(spans, starts),
        *_span_events(spans, _tracks(spans), starts),
    ]
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": DEVICE_PID, "name": device}],
        "distributedInfo": {"rank": 0, "world_size": 1},
        "displayTimeUnit": "ms",
        "zenflow": {"version": _FORMAT_VERSION, "metadata": dict(metadata)},
        "traceEvents": events,
    }


def from_chrome_trace(trace: Mapping[str, Any]) -> tuple[tuple[Span, ...], dict[str, Any]]:
    """Return the spans and the metadata that ``to_chrome_trace`` was given.

    Raises:
        ValueError: The trace wasn't made by ``to_chrome_trace``, or by a newer version of it.
    """
    header = trace.get("zenflow")
    if not isinstance(header, dict):
        raise ValueError(
            "a trace must have been written by Timeline.write to be read back, but this one has "
            "no 'zenflow' entry: traces of other tools can't be turned into a Timeline"
        )
    if header["version"] != _FORMAT_VERSION:
        raise ValueError(
            f"trace format must be version {_FORMAT_VERSION}, got {header['version']}: "
            "read it with the version of zenflow that wrote it"
        )
    own = (DEVICE_PID, HOST_PID)  # other processes are other ranks
    args = (
        event.get("args", {})
        for event in trace["traceEvents"]
        if event["ph"] == "X" and event["pid"] in own
    )
    spans = (
        Span(a["lane"], a["span"], a["start_s"], a["end_s"], a["step"], a["bytes"])
        for a in args
        if "span" in a
    )
    return tuple(spans), header["metadata"]


def write_trace(
    spans: Sequence[Span], metadata: Mapping[str, Any], path: str | PathLike[str]
) -> None:
    """Write the trace whole or not at all; see ``Timeline.write``."""
    write_chrome_trace(to_chrome_trace(spans, metadata), path)


def write_chrome_trace(trace: Mapping[str, Any], path: str | PathLike[str]) -> None:
    """Write a trace of ``to_chrome_trace`` to a file, whole or not at all."""
    target = Path(path)
    encoded = json.dumps(trace).encode()
    if target.suffix == ".gz":
        encoded = gzip.compress(encoded, mtime=0)
    # Beside the target, since a rename is atomic only within one file system.
    draft = target.with_name(f".{target.name}.{os.getpid()}.draft")
    try:
        with naming_file(target, draft):
            with draft.open("wb") as file:
                file.write(encoded)
                file.flush()
                os.fsync(file.fileno())  # else a crash may leave the new name with no content
            draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


def read_trace(path: str | PathLike[str]) -> tuple[tuple[Span, ...], dict[str, Any]]:
    """Return the spans and metadata of a file of ``write_trace``; see ``Timeline.read``."""
    source = Path(path)
    content = source.read_bytes()
    if source.suffix == ".gz":
        content = gzip.decompress(content)
    trace = json.loads(content)
    if not isinstance(trace, dict):
        raise ValueError(f"a trace must be a JSON object, got {type(trace).__name__} in {source}")
    return from_chrome_trace(trace)


def _tracks(spans: Sequence[Span]) -> dict[str, _Track]:
    """Return each lane's track; lanes beyond the common four get threads of the host."""
    others = [lane for lane in lanes_of(spans) if lane not in _TRACKS]
    return _TRACKS | {
        lane: _Track(HOST_PID, _FIRST_OTHER_THREAD + index, "cpu_op", lane)
        for index, lane in enumerate(others)
    }


def _process_events(device: str, metadata: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield processes' names and the timeline's kind: "measured, emulated link", for example."""
    labels = [str(metadata["source"])] if "source" in metadata else []
    if metadata.get("emulated_link"):
        labels.append("emulated link")
    for pid, name in ((DEVICE_PID, device), (HOST_PID, "host")):
        yield _metadata_event("process_name", pid, 0, name=name)
        yield _metadata_event("process_sort_index", pid, 0, sort_index=pid)
        if labels:
            yield _metadata_event("process_labels", pid, 0, labels=", ".join(labels))


def _step_starts(spans: Sequence[Span]) -> dict[int, float]:
    """Return the start of each step's first span, in order of time."""
    starts: dict[int, float] = {}
    for span in _loop_spans(spans):
        starts[span.step] = min(span.start, starts.get(span.step, span.start))
    return dict(sorted(starts.items(), key=lambda item: item[1]))


def _loop_spans(spans: Sequence[Span]) -> Sequence[Span]:
    # A step is the training loop's, so the host's later work for it doesn't stretch it.
    return [span for span in spans if span.lane == "device"] or spans


def _step_events(spans: Sequence[Span], starts: Mapping[int, float]) -> Iterator[dict[str, Any]]:
    """Yield a ProfilerStep per step: from its first span on the device to the next step's."""
    last = max((span.end for span in _loop_spans(spans)), default=0.0)
    for (step, start), end in zip(starts.items(), [*starts.values(), last][1:], strict=True):
        # HTA drops kernels that no host event launched, so a step launches all of its own.
        args = {"correlation": _FIRST_CORRELATION + step}
        yield _complete_event(_STALL_TRACK, f"ProfilerStep#{step}", start, end, _STEP_THREAD, args)


def _span_events(
    spans: Sequence[Span], tracks: Mapping[str, _Track], starts: Mapping[int, float]
) -> Iterator[dict[str, Any]]:
    """Yield the names of the threads in use, then the spans in their order."""
    placed = [_STALL_TRACK if span.is_stall else tracks[span.lane] for span in spans]
    rows = _rows(spans, placed)
    used = {(track, row) for track, row in zip(placed, rows, strict=True)} | {(_STALL_TRACK, 0)}
    for track, row in sorted(used, key=lambda item: (item[0].pid, item[0].thread, item[1])):
        name = track.label if row == 0 else f"{track.label} ({row + 1})"
        yield _metadata_event("thread_name", track.pid, _thread(track, row), name=name)
    waits = merge((span.start, span.end) for span in spans if span.is_stall)
    for span, track, row in zip(spans, placed, rows, strict=True):
        name = span.name if track.event_name is None else track.event_name
        thread = _thread(track, row)
        place = _place(track, thread, _launching_step(span, starts))
        args = _arguments(span, track) | place
        for start, end in _pieces(span, waits):
            yield _complete_event(track, name, start, end, thread, args)
            args = place  # the span itself is told once


def _pieces(span: Span, waits: list[Interval]) -> list[Interval]:
    """Return a device span without the waits inside it: readers count kernels as work."""
    whole = (span.start, span.end)
    if span.lane != "device" or span.is_stall:
        return [whole]
    return subtract([whole], waits) or [(span.start, span.start)]


def _rows(spans: Iterable[Span], placed: Iterable[_Track]) -> list[int]:
    """Return for each span the first row of its track that is free when it starts.

    Viewers draw events of one thread as nested calls, so two that overlap need two rows.
    """
    order = sorted(enumerate(zip(spans, placed, strict=True)), key=lambda item: item[1][0].start)
    free_from: dict[_Track, list[float]] = {}
    rows = [0] * len(order)
    for index, (span, track) in order:
        ends = free_from.setdefault(track, [])
        row = next((row for row, end in enumerate(ends) if end <= span.start), len(ends))
        ends[row : row + 1] = [span.end]
        rows[index] = row
    return rows


def _thread(track: _Track, row: int) -> int:
    return track.thread + row * _THREADS_PER_LANE


def _arguments(span: Span, track: _Track) -> dict[str, Any]:
    """Return an event's `args`: values for Kineto's readers, and the exact span."""
    arguments: dict[str, Any] = {
        "lane": span.lane,
        "span": span.name,
        "step": span.step,
        "bytes": span.num_bytes,
        # Microseconds in ts and dur round; these don't.
        "start_s": span.start,
        "end_s": span.end,
    }
    if track.category == "gpu_memcpy":
        gigabytes_per_second = span.num_bytes / span.seconds / 1e9 if span.seconds else 0.0
        arguments["memory bandwidth (GB/s)"] = gigabytes_per_second
    return arguments


def _place(track: _Track, thread: int, launched_by: int) -> dict[str, Any]:
    if track.pid != DEVICE_PID:
        return {}
    return {
        "device": DEVICE_PID,
        "context": 1,
        "stream": thread,
        "correlation": _FIRST_CORRELATION + launched_by,
    }


def _launching_step(span: Span, starts: Mapping[int, float]) -> int:
    """Return the span's step, or the nearest where a cut left copies of a step but not itself."""
    if span.step in starts:
        return span.step
    return min(starts, key=lambda step: abs(step - span.step))


def _complete_event(
    track: _Track, name: str, start: float, end: float, thread: int, args: dict[str, Any]
) -> dict[str, Any]:
    """Return an event of phase X: one that has a start and a duration, in microseconds."""
    # To the nanosecond, as Kineto: HTA takes the whole microseconds inside an event, so an end
    # that the last bit puts below 400000 would lose one of them.
    first, last = (round(moment * _MICROSECONDS, 3) for moment in (start, end))
    return {
        "ph": "X",
        "cat": track.category,
        "name": name,
        "pid": track.pid,
        "tid": thread,
        "ts": first,
        "dur": round(last - first, 3),
        "args": args,
    }


def _metadata_event(kind: str, pid: int, thread: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": thread, "ts": 0, "args": args}
