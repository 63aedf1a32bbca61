"""Interrupts: a signal ends a measurement at once, and everything else in its own time.

Child processes don't hear Ctrl-C at all: their parent decides.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any


class Interrupts:
    """Context in which signals raise KeyboardInterrupt only where that does no harm.

    In the middle of a write to a study's storage it would leave a lock behind, or a trial that
    nobody fails. Elsewhere than in Python's main thread, which gets all signals, it does nothing.
    """

    def __init__(self, *signals: signal.Signals) -> None:
        """Take over these signals; Ctrl-C's second one has its usual effect again."""
        self._signals = signals
        self._former: dict[signal.Signals, Any] = {}
        self._noted = False
        self._may_raise = False

    def __enter__(self) -> Interrupts:
        """Take the signals over, except those that the program ignored from its start."""
        if threading.current_thread() is threading.main_thread():
            for number in self._signals:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._former[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        """Give the signals back."""
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Return if no signal has come.

        Raises:
            KeyboardInterrupt: One has.
        """
        if self._noted:
            raise KeyboardInterrupt

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Raise KeyboardInterrupt as soon as a signal comes, or at once if one has come."""
        self._may_raise = True
        try:
            self.check()
            yield
        finally:
            self._may_raise = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._noted = True
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._may_raise:
            self._may_raise = False  # what it interrupts is to end in peace
            raise KeyboardInterrupt


@contextmanager
def deaf_children() -> Iterator[None]:
    """Start processes that don't hear Ctrl-C.

    A terminal sends Ctrl-C to all processes of a command. One that is still loading would die of
    it with a traceback, before it could say that it doesn't listen. Processes inherit the signal
    mask, so they are deaf from their first moment on. This process hears the signal afterwards.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def start_deaf(process: BaseProcess) -> None:
    """Start one of multiprocessing's processes so that it doesn't hear Ctrl-C."""
    resource_tracker.ensure_running()  # it is started with the first, and would lift the mask
    with deaf_children():
        process.start()
