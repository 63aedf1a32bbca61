"""The host's threads in C: jobs are handed over whole, and none of the rows is Python's work.

A Python thread for each core would ask for the interpreter a thousand times a step, and keep it
from the thread that launches the device's work. See `_host_pool.c`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from zenflow.host.library import c_library

PIECE_ELEMENTS = 1 << 17
"""Number of elements that a thread takes at once. All threads then end at about the same time."""

ACCUMULATE, MOMENTS, ADAMW = range(3)
"""Kinds of jobs: add a gradient to a sum, add one to the moments, end a window."""


class HostJob(ctypes.Structure):
    """One block's work on its rows, as `_host_pool.c` declares it.

    It holds addresses and no references: whoever makes it keeps the tensors alive.
    """

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("grad_dtype", ctypes.c_int32),
        ("out_dtype", ctypes.c_int32),
        ("is_first", ctypes.c_int32),
        ("rows", ctypes.c_int64),
        ("cols", ctypes.c_int64),
        ("master", ctypes.c_void_p),
        ("exp_avg", ctypes.c_void_p),
        ("exp_avg_sq", ctypes.c_void_p),
        ("acc", ctypes.c_void_p),
        ("grad", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("step", ctypes.c_void_p),
        ("active", ctypes.c_void_p),
        ("lr", ctypes.c_double),
        ("beta1", ctypes.c_double),
        ("beta2", ctypes.c_double),
        ("eps", ctypes.c_float),
        ("decay", ctypes.c_float),
        ("prediction", ctypes.c_float),
        ("count", ctypes.c_float),
    )


class HostPool:
    """C threads that help their callers with jobs. Owned by the optimizer; `close` ends them."""

    def __init__(self, library: ctypes.CDLL, num_helpers: int) -> None:
        """Start the threads, of which there may be none: callers work themselves.

        Raises:
            RuntimeError: The system gives no more.
        """
        self._library = library
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

    def run(self, jobs: Sequence[HostJob], factor: float) -> None:
        """Do all rows of all jobs, gradients times the clip factor; any thread may call it.

        What the jobs point to must stay alive until then.
        """
        array = (HostJob * len(jobs))(*jobs)
        self._library.zenflow_pool_run(self._pool, array, len(jobs), factor, PIECE_ELEMENTS)

    def close(self) -> None:
        """End the threads; no call may be under way."""
        if self._pool:
            self._library.zenflow_pool_close(self._pool)
            self._pool = None
