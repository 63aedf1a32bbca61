"""One trace of several ranks, with a process for each rank's device and for its host."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zenflow.trace.chrome import DEVICE_PID, HOST_PID, to_chrome_trace, write_chrome_trace
from zenflow.trace.timeline import Timeline

if TYPE_CHECKING:
    from collections.abc import Sequence
    from os import PathLike

STARTED = "started_at"
"""Key of a timeline's metadata: the start of its clock, in seconds of Unix time."""
_PIDS_OF_A_RANK = 2
_CORRELATIONS_OF_A_RANK = 1 << 20


def write_ranks(timelines: Sequence[Timeline], path: str | PathLike[str]) -> None:
    """Write the timelines of all ranks as one trace, on the first one's clock.

    ``Timeline.read`` reads the first rank's timeline from it. Between
    machines, ranks are off by as much as the machines' clocks.

    Args:
        timelines: Timeline of each rank, in order.
        path: The file; a name in ``.gz`` is compressed.

    Raises:
        OSError: The file can't be written; an earlier one of this name is untouched.
    """
    first, *others = timelines
    trace = to_chrome_trace(first.spans, first.metadata)
    if others:
        _name(trace["traceEvents"], 0)
        trace["distributedInfo"]["world_size"] = len(timelines)
    for rank, timeline in enumerate(others, start=1):
        events = to_chrome_trace(_on_clock(timeline, first).spans, timeline.metadata)[
            "traceEvents"
        ]
        _name(events, rank)
        trace["traceEvents"] += [_moved(event, rank) for event in events]
    write_chrome_trace(trace, path)


def _on_clock(timeline: Timeline, first: Timeline) -> Timeline:
    """Return a timeline with its seconds on another's clock; unchanged if a clock is unknown."""
    if STARTED not in timeline.metadata or STARTED not in first.metadata:
        return timeline
    later = timeline.metadata[STARTED] - first.metadata[STARTED]
    spans = (
        replace(span, start=span.start + later, end=span.end + later) for span in timeline.spans
    )
    return replace(timeline, spans=tuple(spans))


def _name(events: Sequence[dict[str, Any]], rank: int) -> None:
    for event in events:
        if event["name"] == "process_name":
            event["args"]["name"] = f"rank {rank}: {event['args']['name']}"


def _moved(event: dict[str, Any], rank: int) -> dict[str, Any]:
    """Return an event in its rank's processes, behind those of the ranks before."""
    args = dict(event["args"])
    if "device" in args:
        args["device"] += _PIDS_OF_A_RANK * rank
    if "correlation" in args:
        args["correlation"] += _CORRELATIONS_OF_A_RANK * rank
    if event["name"] == "process_sort_index":
        args["sort_index"] += _PIDS_OF_A_RANK * rank
    pid = event["pid"] + _PIDS_OF_A_RANK * rank
    return {**event, "pid": pid, "args": args}


assert {DEVICE_PID, HOST_PID} == set(range(_PIDS_OF_A_RANK))
