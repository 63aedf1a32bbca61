"""The compiled replay: found and loaded once in a process, or None where it is not built."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

_FILE = Path(__file__).with_name("_replay.so")
_INTERFACE = 2  # the one the C file declares; raised with every change of a signature

_INT, _LONG, _POINTER = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p


class CTape(ctypes.Structure):
    """`Tape` of _replay.h."""

    _fields_ = (
        *((name, _INT) for name in ("num_jobs", "num_operations", "num_steps", "settling")),
        *(
            (name, _POINTER)
            for name in (
                "lane", "is_awaited", "num_bytes", "steps", "step", "deadline", "rank",
                "after_at", "after", "awaited", "submitted", "step_end", "stall_begin",
                "gap_at", "passed", "room_at", "room",
            )
        ),
    )  # fmt: skip


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
