"""Ctrl-C, SIGTERM and SIGHUP as a request: finish the step, save, say so, leave with 128 + number.

A second signal ends the process at once, except one that comes with the first: who sees nothing
happen presses twice, and a terminal that closes signals twice.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
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
        self._since = 0.0
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        """Take over the signals; only Python's main thread may."""
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                    continue  # nohup: a terminal that closes is none of its business
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
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._since = signal.Signals(number), now
            if self._notice:
                # Past all buffers: the signal may have come in the middle of a print.
                with suppress(OSError):  # the terminal is gone, which was the signal
                    os.write(2, f"\n{self._notice}\n".encode())
        elif number != signal.SIGHUP and now - self._since > _SAME_SECONDS:
            raise KeyboardInterrupt  # no save can trap the user
