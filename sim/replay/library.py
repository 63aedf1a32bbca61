"""The compiled replay: found and loaded once in a process, or None where it is not built."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import numpy as np

_FILE = Path(__file__).with_name("_replay.so")
_INTERFACE = 2  # the one the C file declares; raised with every change of a signature

_INT, _LONG, _POINTER = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p

TAPE_ARRAYS = {
    "lane": np.int8, "is_awaited": np.int8, "num_bytes": np.float64, "steps": np.float64,
    "step": np.int32, "deadline": np.int32, "rank": np.int32, "after_at": np.int64,
    "after": np.int32, "awaited": np.int32, "submitted": np.int32, "step_end": np.int32,
    "stall_begin": np.int32, "gap_at": np.int32, "passed": np.int32, "room_at": np.int64,
    "room": np.int32,
}  # fmt: skip
"""Arrays of `Tape` of _replay.h and their types, in order."""


class CTape(ctypes.Structure):
    """`Tape` of _replay.h."""

    _fields_ = (
        *((name, _INT) for name in ("num_jobs", "num_operations", "num_steps", "settling")),
        *((name, _POINTER) for name in TAPE_ARRAYS),
    )


@functools.cache
def replay_library() -> ctypes.CDLL | None:
    """Return the library, or None where points are simulated by SimPy: slower, with one result."""
    try:
        library = ctypes.CDLL(str(_FILE))
        if int(library.sim_replay_interface()) != _INTERFACE:
            return None
    except (OSError, AttributeError):
        return None
    library.sim_replay.restype = _INT
    library.sim_replay.argtypes = (
        ctypes.POINTER(CTape), *[_POINTER] * 3, *[_LONG] * 2, *[_POINTER] * 3,
    )  # fmt: skip
    return library
