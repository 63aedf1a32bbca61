"""Stall clock: measures the device's waits by cause, without adding a wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from zenflow.device.base import AbstractDevice
from zenflow.trace.recorder import Recorder

_HOSTS = ("d2h", "host")
"""Causes behind which the host's work may be, whose end gives memory to gradients, and updates."""

NOTICEABLE = 20e-6
"""Seconds from which a wait gets a span; shorter ones are only counted."""


class StallClock:
    """Collects marks on the compute stream around every wait of one step."""

    def __init__(
        self,
        device: AbstractDevice,
        recorder: Recorder,
        drive_seconds: Callable[[], float] | None = None,
    ) -> None:
        """Start with no wait.

        Args:
            device: Device whose waits are measured.
            recorder: Keeps spans of the waits.
            drive_seconds: Clock of the seconds in which the host has had nothing to work on, for
                want of states that a drive has; None without a drive.
        """
        self._device = device
        self._recorder = recorder
        self._drive_seconds = drive_seconds
        self._waits: list[tuple[str, Any, Any, float]] = []
        self._is_waiting = False

    @contextmanager
    def waiting(self, cause: str) -> Iterator[None]:
        """Count the device's time inside of the `with` block as a stall of this cause.

        The part in which the host itself waits for a drive is the drive's. A wait inside of
        another is a part of that one.
        """
        if self._is_waiting:
            yield
            return
        self._is_waiting = True
        drive = self._drive_seconds if cause in _HOSTS else None
        start = self._device.timing_mark()
        began, before = time.perf_counter(), drive() if drive else 0.0
        try:
            yield
        finally:
            share = 0.0
            if drive:
                waited = time.perf_counter() - began
                share = min(1.0, (drive() - before) / waited) if waited else 0.0
            self._waits.append((cause, start, self._device.timing_mark(), share))
            self._is_waiting = False

    def take(self) -> list[tuple[str, Any, Any, float]]:
        """Return the step's waits, and begin the next step's list."""
        waits, self._waits = self._waits, []
        return waits

    def resolve(self, waits: list[tuple[str, Any, Any, float]], step: int) -> dict[str, float]:
        """Return seconds by cause; on a GPU this waits until the device has passed the marks."""
        seconds: dict[str, float] = {}
        for cause, start_mark, end_mark, share in waits:
            start = self._device.seconds_of(start_mark)
            end = max(start, self._device.seconds_of(end_mark))
            turn = start + share * (end - start)
            for name, first, last in (("drive", start, turn), (cause, turn, end)):
                if name == cause or last > first:
                    seconds[name] = seconds.get(name, 0.0) + last - first
                if last - first > NOTICEABLE:
                    self._recorder.add("device", f"stall:{name}", first, last, step)
        return seconds
