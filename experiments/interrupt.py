"""Ctrl-C and SIGTERM as a request: finish the step, save, say so, leave with 130 or 143."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Context in which the first signal is noted and a second one ends the process at once."""

    def __init__(self) -> None:
        """Nothing is requested yet."""
        self.signal: signal.Signals | None = None
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        """Take over the two signals; only Python's main thread may."""
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._former[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give the signals back."""
        self._restore()

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
        self.signal = signal.Signals(number)
        # From here on a second signal has its usual effect, so no save can trap the user.
        self._restore()
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _restore(self) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._former.clear()
