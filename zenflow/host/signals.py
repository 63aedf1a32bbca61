"""Signals that wait: a handler that raises in the middle of a step would leave half a step.

Python runs the handlers of signals in its main thread, between any two instructions. A handler may
raise `KeyboardInterrupt` (Ctrl-C) or another error, or save a checkpoint. Steps, hooks and saves
must be whole, so they hold the handlers up until they end.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from _signal import getsignal  # type: ignore[import-not-found]
from _signal import signal as set_handler
from collections.abc import Callable
from functools import wraps
from types import FrameType
from typing import Any, ParamSpec, TypeVar

# `signal.getsignal` and `signal.signal` turn numbers into enums, which takes six times as long as
# the functions of C below them. Hooks come here for every parameter.

AGAIN_SECONDS = 1.0
"""Seconds after which the signal that waits is not held up when it comes again: who presses Ctrl-C
twice sees a step that hangs."""

_NAMES = (
    *("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGBREAK", "SIGALRM", "SIGVTALRM"),
    *("SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGCONT", "SIGTSTP"),
)
_SIGNALS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))
"""Signals whose handlers end programs, save or raise."""

_Handler = Callable[[int, FrameType | None], Any]
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class Uninterrupted:
    """Context that holds signals up: their Python handlers run when it ends.

    Inside of another such context, and in other threads than Python's main one, it does nothing.
    """

    _outermost: Uninterrupted | None = None
    """Context that holds signals up; set by the main thread alone."""

    def __init__(self) -> None:
        """Hold nothing up yet."""
        self._handlers: dict[int, _Handler] = {}
        self._taken: list[int] = []
        self._waiting: dict[int, float] = {}
        self._process = 0

    def __enter__(self) -> None:
        """Replace the handlers by one that only remembers signals."""
        if threading.get_ident() != threading.main_thread().ident or Uninterrupted._outermost:
            return
        self._process = os.getpid()
        try:
            Uninterrupted._outermost = self
            for number in _SIGNALS:
                handler = getsignal(number)
                if callable(handler):  # else the system's own way, or none of Python's
                    self._handlers[number] = handler
                    self._taken.append(number)
                    set_handler(number, self._note)
        except BaseException:  # a handler's that is still in its place
            self._end()
            raise

    def __exit__(self, *error: object) -> None:
        """Put the handlers back, and run those whose signals have come."""
        if Uninterrupted._outermost is self:
            self._end()

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        is_late = now - self._waiting.setdefault(number, now) > AGAIN_SECONDS
        if is_late or os.getpid() != self._process:  # a fork may never come to the end
            del self._waiting[number]
            self._handlers[number](number, frame)

    def _end(self) -> None:
        Uninterrupted._outermost = None  # first: from then on handlers may raise again
        try:
            self._give_back()
        finally:
            self._run()

    def _give_back(self) -> None:
        """Put all handlers back, even if one that is back already raises meanwhile."""
        try:
            while self._taken:
                number = self._taken[-1]
                if getsignal(number) == self._note:  # else somebody has put another there
                    set_handler(number, self._handlers[number])
                self._taken.pop()
        finally:
            if self._taken:
                self._give_back()

    def _run(self) -> None:
        """Run all handlers that wait, even if one of them raises."""
        try:
            while self._waiting:
                number = next(iter(self._waiting))
                del self._waiting[number]
                self._handlers[number](number, sys._getframe())
        finally:
            if self._waiting:
                self._run()


def whole(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Return the function in `Uninterrupted`: no handler of a signal sees it half done."""

    @wraps(function)
    def uninterrupted(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        with Uninterrupted():
            return function(*args, **kwargs)

    return uninterrupted
