"""The host's threads in C: Python hands whole jobs over, and C works on all rows.

With a Python thread for each core, these would take the interpreter a thousand times a step from
the thread that launches the device's work. See `csrc/pool.c`.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence

from zenflow.host.jobs import CJob
from zenflow.host.library import c_library
from zenflow.host.process import OwnProcess

PIECE_ELEMENTS = 1 << 17
"""Number of elements that a thread takes at once. All threads then end at about the same time."""


class HostPool:
    """C threads that help their callers with jobs. Owned by the optimizer; `close` ends them."""

    def __init__(self, library: ctypes.CDLL, num_helpers: int) -> None:
        """Start the threads, of which there may be none: callers work themselves.

        Raises:
            RuntimeError: The system gives no more.
        """
        self._library = library
        self._process = OwnProcess()
        self._lock = threading.Lock()
        self._num_calls = 0
        self._pool = library.zenflow_pool_open(num_helpers)
        if not self._pool:
            raise RuntimeError(
                f"the system gives no {num_helpers} threads for the host's update: choose fewer "
                "host_threads, or raise the limit on processes (ulimit -u)"
            )

    @classmethod
    def open(cls, num_helpers: int) -> HostPool | None:
        """Return a pool, or None where the host's updates run on torch operations."""
        library = c_library()
        return None if library is None else cls(library, num_helpers)

    def run(self, jobs: Sequence[CJob]) -> None:
        """Do all rows of all jobs; any thread may call it.

        The jobs' tensors must stay alive until the call returns.
        """
        array = (CJob * len(jobs))(*jobs)
        with self._lock:
            self._num_calls += 1
        try:
            self._library.zenflow_pool_run(self._pool, array, len(jobs), PIECE_ELEMENTS)
        finally:
            with self._lock:
                self._num_calls -= 1

    def close(self) -> None:
        """End the threads, unless a call hangs that uses them, or they are another process's."""
        if not self._process.is_here:
            return
        with self._lock:
            if self._num_calls:
                return
            pool, self._pool = self._pool, None
        if pool:
            self._library.zenflow_pool_close(pool)
