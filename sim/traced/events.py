"""Events of a trace that torch.profiler exports (Kineto's Chrome JSON), plain or compressed.

Only events that say when something ran are kept: of a large file that is a small part.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zenflow.errors import ConfigError

_CALLS = frozenset({"cuda_runtime", "cuda_driver", "runtime", "hip_runtime"})
_WORK = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_KEPT = frozenset({"cpu_op", "user_annotation"}) | _CALLS | _WORK
HOW = (
    "trace some steps with torch.profiler.profile and a schedule, call its step() in the loop, "
    "and export_chrome_trace() a file"
)
"""Advice on how to make a trace, for errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event with a begin and an end, in seconds from the trace's first one."""

    name: str
    category: str
    """Kind as Kineto names it, such as cpu_op, kernel or cuda_runtime."""
    start: float
    seconds: float
    thread: str
    """Process and thread of the host."""
    arguments: Mapping[str, Any]

    @property
    def end(self) -> float:
        """End of the event, seconds."""
        return self.start + self.seconds

    @property
    def is_call(self) -> bool:
        """Whether it is a call of the device's runtime, such as a kernel's launch."""
        return self.category in _CALLS

    @property
    def is_work(self) -> bool:
        """Whether it ran on the device."""
        return self.category in _WORK


@dataclass(frozen=True, slots=True, kw_only=True)
class KinetoTrace:
    """A file's events in the order of their begins, and the devices that it names."""

    path: Path
    events: tuple[Event, ...]
    devices: Mapping[int, str]
    """Names of GPUs by number."""


def read_events(path: str | Path) -> KinetoTrace:
    """Return the events of a trace file.

    Raises:
        ConfigError: The file can't be read, ends too early, or is no trace of torch.profiler.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
        text = gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content
        found = json.loads(text, object_hook=_kept)
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror or error}") from error
    except (ValueError, EOFError, zlib.error, RecursionError) as error:
        raise ConfigError(
            f"{path} is no whole JSON file ({error}): export the trace again, and let the export "
            "end before the process does"
        ) from error
    events = found.get("traceEvents") if isinstance(found, dict) else None
    if not isinstance(events, list):
        raise ConfigError(f"{path} has no traceEvents, so it is no trace: {HOW}")
    kept = [event for event in events if isinstance(event, dict)]
    if not kept:
        raise ConfigError(f"{path} has no event of torch.profiler: {HOW}")
    properties = found.get("deviceProperties") or ()
    try:
        first = min(event["ts"] for event in kept)
        events = sorted((_event(e, first) for e in kept), key=lambda e: (e.start, -e.end))
        devices = {own["id"]: own["name"] for own in properties if {"id", "name"} <= own.keys()}
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{path} has events that torch.profiler does not write ({type(error).__name__}: "
            f"{error}): {HOW}"
        ) from error
    return KinetoTrace(path=path, events=tuple(events), devices=devices)


def _kept(record: dict[str, Any]) -> dict[str, Any] | None:
    """Return a JSON object, but None for an event that nothing here reads."""
    if "ph" not in record:
        return record
    is_whole = record["ph"] == "X" and isinstance(record.get("dur"), int | float)
    return record if is_whole and str(record.get("cat")).casefold() in _KEPT else None


def _event(record: Mapping[str, Any], first: float) -> Event:
    # Microseconds since 1970 leave a double few digits: begin at the first event.
    name, arguments = record["name"], record.get("args") or {}
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        raise TypeError(f"an event's name must be text, and args an object, got {name!r:.60}")
    return Event(
        name=name,
        category=record["cat"].casefold(),
        start=(record["ts"] - first) / 1e6,
        seconds=record["dur"] / 1e6,
        thread=f"{record.get('pid')}/{record.get('tid')}",
        arguments=arguments,
    )
