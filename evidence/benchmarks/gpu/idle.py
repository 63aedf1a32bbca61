"""Idle time of a GPU by its own trace: what the profiler saw, beside what the engine reports."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

_WORK = ("kernel", "gpu_memset")
"""Categories of a Chrome trace of torch's profiler that keep a device busy; its copy engines,
``gpu_memcpy``, don't."""


def profiled_idle(steps: Callable[[], None]) -> dict[str, float] | None:
    """Run steps under torch's profiler; return what their device did; None without a GPU.

    Args:
        steps: Takes them and waits for the device.
    """
    if not torch.cuda.is_available():
        steps()
        return None
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        steps()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return idle_of(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])


def idle_of(events: Iterable[Mapping[str, Any]]) -> dict[str, float] | None:
    """Return how long the stream that computes most stood still between its first and last kernel.

    Args:
        events: Of a Chrome trace; ``ts`` and ``dur`` in microseconds.

    Returns:
        ``seconds`` from the first kernel to the last, ``idle_seconds`` of them, and their share;
        None where nothing was computed.
    """
    streams: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in _WORK:
            stream = event.get("args", {}).get("stream", event.get("tid"))
            start = float(event["ts"])
            streams[stream].append((start, start + float(event["dur"])))
    if not streams:
        return None
    spans = sorted(max(streams.values(), key=lambda own: sum(end - at for at, end in own)))
    busy, reached = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    whole = reached - spans[0][0]
    return {
        "seconds": whole / 1e6,
        "idle_seconds": (whole - busy) / 1e6,
        "idle_share": (whole - busy) / whole if whole > 0 else 0.0,
    }
