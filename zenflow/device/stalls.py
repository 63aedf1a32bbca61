"""Stall clock: measures the device's waits by cause, without adding a wait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from zenflow.device.base import AbstractDevice
from zenflow.trace.recorder import Recorder

NOTICEABLE = 20e-6
"""Seconds from which a wait gets a span; shorter ones are only counted."""


class StallClock:
    """Collects marks on the compute stream around every wait of one step."""

    def __init__(self, device: AbstractDevice, recorder: Recorder) -> None:
        """Start with no wait."""
        self._device = device
        self._recorder = recorder
        self._waits: list[tuple[str, Any, Any]] = []

    @contextmanager
    def waiting(self, cause: str) -> Iterator[None]:
        """Count the device's time inside of the `with` block as a stall of this cause."""
        start = self._device.timing_mark()
        try:
            yield
        finally:
            self._waits.append((cause, start, self._device.timing_mark()))

    def take(self) -> list[tuple[str, Any, Any]]:
        """Return the step's waits, and begin the next step's list."""
        waits, self._waits = self._waits, []
        return waits

    def resolve(self, waits: list[tuple[str, Any, Any]], step: int) -> dict[str, float]:
        """Return seconds by cause; on a GPU this waits until the device has passed the marks."""
        seconds: dict[str, float] = {}
        for cause, start_mark, end_mark in waits:
            start = self._device.seconds_of(start_mark)
            end = max(start, self._device.seconds_of(end_mark))
            seconds[cause] = seconds.get(cause, 0.0) + end - start
            if end - start > NOTICEABLE:
                self._recorder.add("device", f"stall:{cause}", start, end, step)
        return seconds
