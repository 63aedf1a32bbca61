"""Holders of another process's interpreter lock, by looking at its memory.

CPU time is an upper bound only: torch and C give the lock up while they compute. CPython up to
3.11 keeps the thread that holds the lock in `_PyRuntime`. The measured process says where that is
(`LockFacts`), and the process that started it looks there some hundred times a second
(`LockWatch`). That costs the measured process nothing. Linux lets a parent read a child's memory
unless it is told otherwise; where anything of this is missing there is no watch.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

OUTSIDE, OTHER, COUNTED, BARE = range(4)
"""Places of the training thread: between two turns; in a turn, but not in a section; in a section
that counts; in one to be subtracted."""
SAMPLE_SECONDS = 1e-3
"""Seconds between two looks. The watching process needs a core too, for as short as may be."""
FREE_SECONDS = 5.0
"""Seconds in which a process that has told its facts must have let go of the lock."""
_WORD = ctypes.sizeof(ctypes.c_void_p)
_RUNTIME_WORDS = 200  # the thread state is near the start of the structure
_STATE_WORDS = 40


class LockFacts:
    """Facts about its lock that a process shares with its parent."""

    def __init__(self) -> None:
        """Start between turns."""
        self._section = ctypes.c_int64(OUTSIDE)

    @property
    def section(self) -> int:
        """Place of the training thread."""
        return self._section.value

    @section.setter
    def section(self, kind: int) -> None:
        self._section.value = kind

    def told(self, role_of: Callable[[str], str | None]) -> dict[str, Any] | None:
        """Return addresses and threads, once all threads are there; None where it can't be."""
        if sys.version_info >= (3, 12) or sys.platform != "linux":
            return None
        own = _api("PyThreadState_Get")()
        runtime = ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, "_PyRuntime"))
        holders = [runtime + _WORD * place for place in _places(runtime, _RUNTIME_WORDS, own)]
        idents = _places(own, _STATE_WORDS, threading.get_ident())
        if not holders or not idents:
            return None
        names = {thread.ident: role_of(thread.name) for thread in threading.enumerate()}
        roles = {}
        state = _api("PyInterpreterState_ThreadHead")(_api("PyInterpreterState_Get")())
        while state:
            ident = ctypes.c_size_t.from_address(state + _WORD * idents[0]).value
            roles[str(state)] = names.get(ident) or "others"
            state = _api("PyThreadState_Next")(state)
        return {
            "section": ctypes.addressof(self._section),
            "holders": holders,
            "roles": roles,
        }


def _api(name: str) -> Any:
    function = ctypes.pythonapi[name]
    function.restype = ctypes.c_void_p
    if name in ("PyInterpreterState_ThreadHead", "PyThreadState_Next"):
        function.argtypes = [ctypes.c_void_p]
    return function


def _places(address: int, num_words: int, wanted: int) -> list[int]:
    words = (ctypes.c_size_t * num_words).from_address(address)
    return [place for place, word in enumerate(words) if word == wanted]


class LockWatch:
    """Looks at a child's lock while it takes turns."""

    def __init__(self, pid: int, told: Mapping[str, Any]) -> None:
        """Find the lock of a child that waits for its next turn, and so does not hold it.

        Raises:
            OSError: The child's memory can't be read.
            ValueError: Nothing there says that nobody holds the lock.
        """
        self._memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
        self._section = told["section"]
        self._roles = {int(state): role for state, role in told["roles"].items()}
        deadline = time.monotonic() + FREE_SECONDS
        while not (free := [place for place in told["holders"] if self._word(place) == 0]):
            if time.monotonic() > deadline:
                self.close()
                raise ValueError("the lock is not where CPython 3.10 and 3.11 have it")
            time.sleep(0.01)  # it is about to wait, and still holds the lock
        self._holder = free[0]

    def _word(self, address: int) -> int:
        word: int = struct.unpack("N", os.pread(self._memory, _WORD, address))[0]
        return word

    def follow(self, is_over: Callable[[float], bool]) -> dict[str, float]:
        """Return the seconds for which each kind of thread has held the lock.

        Args:
            is_over: Sleeps for some seconds, or less once the turn is over; says whether it is.
        """
        held: dict[str, float] = {}
        former = time.perf_counter()
        while not is_over(SAMPLE_SECONDS):
            now = time.perf_counter()
            role = self._roles.get(self._word(self._holder))
            section = self._word(self._section)
            if role == "training":
                sign = {COUNTED: 1.0, BARE: -1.0}.get(section, 0.0)
            else:
                sign = float(role is not None and section != OUTSIDE)
            if sign and role is not None:
                held[role] = held.get(role, 0.0) + sign * (now - former)
            former = now
        return held

    def close(self) -> None:
        """Let go of the child's memory."""
        os.close(self._memory)
