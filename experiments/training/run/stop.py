"""Signals as a request: finish the step, save, say so, leave with 128 + number.

SIGINT (Ctrl-C) and SIGTERM ask for the end. One of them that comes again ends the process at once,
unless both came together: who sees nothing happen presses twice. SIGHUP, SIGUSR1 and SIGUSR2
announce it: a terminal closes, or a scheduler's time is up soon and its SIGTERM follows.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Any

_ASKING = (signal.SIGINT, signal.SIGTERM)
_ANNOUNCING = tuple(
    getattr(signal, name) for name in ("SIGHUP", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)
)
_SAME_SECONDS = 1.0
"""Signals that are no further apart are one request."""


class StopRequest:
    """Context in which the first signal is noted and a later one ends the process."""

    def __init__(self, notice: str = "") -> None:
        """Nothing is requested yet.

        Args:
            notice: Written to standard error at the first signal, at once.
        """
        self.signal: signal.Signals | None = None
        self._notice = notice
        self._asked: float | None = None
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        """Take over the signals that are not ignored; only Python's main thread may.

        Who begins a program with a signal ignored, as nohup does, wants it to go on.
        """
        if threading.current_thread() is threading.main_thread():
            for number in (*_ASKING, *_ANNOUNCING):
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._former[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *unused: object) -> None:
        """Give the signals back."""
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._former.clear()

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """128 + the signal's number: 130 for Ctrl-C, 143 for SIGTERM; 0 without a signal."""
        return 0 if self.signal is None else 128 + self.signal

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.signal is None:
            self.signal = signal.Signals(number)
            if self._notice:
                # Past all buffers: the signal may have come in the middle of a print.
                with suppress(OSError):  # the terminal is gone, which was the signal
                    os.write(2, f"\n{self._notice}\n".encode())
        if number in _ANNOUNCING:
            return
        now = time.monotonic()
        if self._asked is None:
            self._asked = now
        elif now - self._asked > _SAME_SECONDS:
            raise KeyboardInterrupt  # no save can trap the user
