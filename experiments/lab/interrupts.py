"""SIGTERM as Ctrl-C, for studies and the processes that make their cells."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def ended_like_ctrl_c(number: signal.Signals = signal.SIGTERM) -> Iterator[None]:
    """Let a signal raise KeyboardInterrupt; only Python's main thread can.

    One that the program was begun with ignored stays so.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(number) == signal.SIG_IGN:
        yield
        return
    former = signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(number, former)


def ignore_while_idle() -> None:
    """Let SIGTERM be of no effect in a process that makes no cell; for pools.

    An idle process holds the lock of the pool's queue. Killed, it would leave the others waiting
    for that for ever.
    """
    if signal.getsignal(signal.SIGTERM) != signal.SIG_IGN:
        signal.signal(signal.SIGTERM, _pass_over)  # the next cell can hear it again


def _pass_over(number: int, frame: FrameType | None) -> None:
    del number, frame
