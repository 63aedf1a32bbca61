"""The device's clock, tied to the host's."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from zenflow.device.runtime import CudaRuntime

TRUSTED_SECONDS = 10.0
"""Seconds for which a tie of the two clocks is trusted. They drift, and CUDA gives elapsed time as
a float32 of milliseconds, which after an hour can't tell quarters of one apart."""
MOST_TIES = 8
"""Number of attempts at a tie, of which the closest counts."""
CLOSE_ENOUGH = 20e-6
"""Seconds between the host's readings around a tie from which on no other is tried."""


class DeviceClock:
    """Reads timed events as seconds of `time.perf_counter`.

    A tie is an event that the host encloses by two readings of its clock. It is taken to have
    passed half way between them, so its error is at most half of what lies between: a thread that
    was late to notice it makes a tie bad, but not the closest of several.
    """

    def __init__(self, runtime: CudaRuntime, wait: Callable[[Any], None]) -> None:
        """Tie the clocks on a stream of their own: no compute is waited for.

        Args:
            runtime: The device's streams and events.
            wait: Blocks the calling thread until an event has passed.
        """
        self._runtime = runtime
        self._wait = wait
        self._stream = runtime.new_stream()
        self._tie()

    def _tie(self) -> None:
        closest = float("inf")
        for _ in range(MOST_TIES):
            before = time.perf_counter()
            event = self._runtime.record(self._stream, is_timed=True)
            self._wait(event)
            after = time.perf_counter()
            if after - before < closest:
                closest = after - before
                self._event, self._seconds = event, before + closest / 2
            if closest <= CLOSE_ENOUGH:
                break
        self._tied = time.perf_counter()

    def seconds_of(self, moment: Any) -> float:
        """Return the time of an event that has passed."""
        if time.perf_counter() - self._tied > TRUSTED_SECONDS:
            self._tie()
        return self._seconds + float(self._event.elapsed_time(moment)) / 1e3
