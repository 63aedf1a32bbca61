"""Recorder: collects the spans of the last few steps from every thread."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from zenflow.trace.timeline import Span, Timeline


class Recorder:
    """Keeps spans of the last `num_steps` steps; with 0 it keeps none and costs nothing.

    `add` may be called from any thread. Times are `time.perf_counter` seconds; spans of a GPU are
    kept as events and read when a timeline is asked for.

    Attributes:
        started_at: Start of the spans' clock, in seconds of Unix time.
    """

    def __init__(self, num_steps: int, seconds_of: Callable[[Any], float]) -> None:
        """Make an empty recorder.

        Args:
            num_steps: Number of steps to keep.
            seconds_of: Function that turns a device event into seconds on the host's clock.
        """
        self.num_steps = num_steps
        self._seconds_of = seconds_of
        self._origin = time.perf_counter()
        self.started_at = time.time()
        self._lock = threading.Lock()
        self._oldest = 0
        self._spans: deque[tuple[str, str, Any, Any, int, int]] = deque()

    def add(
        self, lane: str, name: str, start: Any, end: Any, step: int, num_bytes: int = 0
    ) -> None:
        """Keep a span; start and end are seconds of the host's clock, or events of a device."""
        if self.num_steps:
            with self._lock:
                self._spans.append((lane, name, start, end, step, num_bytes))

    def forget_before(self, step: int) -> None:
        """Drop the spans of steps that are `num_steps` or more before this step."""
        if self.num_steps:
            with self._lock:
                self._oldest = step - self.num_steps + 1
                # A lane that was late left its spans behind newer ones: `timeline` sees to those.
                while self._spans and self._spans[0][4] < self._oldest:
                    self._spans.popleft()

    def timeline(self, metadata: dict[str, Any]) -> Timeline:
        """Return the spans kept, in order of start; seconds are counted from `started_at`."""
        with self._lock:
            kept = [span for span in self._spans if span[4] >= self._oldest]
        spans = [
            Span(lane, name, self._relative(start), self._relative(end), step, num_bytes)
            for lane, name, start, end, step, num_bytes in kept
        ]
        return Timeline(tuple(sorted(spans, key=lambda span: span.start)), metadata)

    def _relative(self, moment: Any) -> float:
        seconds = moment if isinstance(moment, float) else self._seconds_of(moment)
        return seconds - self._origin
