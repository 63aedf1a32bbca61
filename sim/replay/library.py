"""The compiled replay: found and loaded once in a process, or None where it is not built."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import numpy as np

_FILE = Path(__file__).with_name("_replay.so")
_INTERFACE = 4  # the one the C file declares; raised with every change of a signature

_INT, _LONG, _DOUBLE, _POINTER = ctypes.c_int32, ctypes.c_int64, ctypes.c_double, ctypes.c_void_p

TAPE_NUMBERS = (
    "num_steps", "num_steady", "period", "is_cpu", "num_sums", "most_jobs", "most_operations",
)  # fmt: skip
"""Numbers of `Tape` of _replay.h, in order."""
TAPE_ARRAYS = (
    "job_at", "operation_at", "gap_at", "stall_begin", "lane", "work", "seconds", "num_bytes",
    "steps", "step", "deadline", "rank", "after_at", "after", "awaited", "sleep", "submitted",
    "passed", "room_at", "room", "sum_at", "place", "factor",
)  # fmt: skip
"""Arrays of `Tape` of _replay.h, in order."""
_DOUBLES = ("num_bytes", "steps", "factor")


class CTape(ctypes.Structure):
    """`Tape` of _replay.h."""

    _fields_ = (
        *((name, _INT) for name in TAPE_NUMBERS), *((name, _POINTER) for name in TAPE_ARRAYS),
    )  # fmt: skip


def type_of(array: str) -> type[np.generic]:
    """Return the type of one of `TAPE_ARRAYS`."""
    return np.float64 if array in _DOUBLES else np.int32


@functools.cache
def replay_library() -> ctypes.CDLL | None:
    """Return the library, or None where SimPy simulates instead: slower, with one result."""
    try:
        library = ctypes.CDLL(str(_FILE))
        if int(library.sim_settle_interface()) != _INTERFACE:
            return None
    except (OSError, AttributeError):
        return None
    library.sim_settle.restype = _INT
    library.sim_settle.argtypes = (
        ctypes.POINTER(CTape), *[_INT] * 4, _DOUBLE, *[_POINTER] * 2, *[_LONG] * 2,
        *[_POINTER] * 2,
    )  # fmt: skip
    return library
