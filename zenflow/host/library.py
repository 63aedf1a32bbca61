"""The compiled C code: found, loaded and bound once in a process, or why there is none."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
import os
import threading
from typing import Any

_logger = logging.getLogger(__name__)

_INTERFACE = 3  # the one the C file declares; raised with every change of a signature
_CHOICES = ("c", "torch")

_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
_ACCUMULATE_TYPES = (_POINTER, _POINTER, _INT, _LONG, _FLOAT, _INT)
_MOMENTS_TYPES = (_POINTER, _POINTER, _POINTER, _INT, _LONG, *(_FLOAT,) * 4)
_ADAMW_TYPES = (
    *(_POINTER, _POINTER, _POINTER, _POINTER, _INT),  # master, exp_avg, exp_avg_sq, out, dtype
    *(_POINTER, _INT, _FLOAT, _POINTER, _FLOAT),  # grad, its dtype and scale, acc, count
    *(_LONG, _LONG, _POINTER, _POINTER, _POINTER),  # rows, cols, step_size, denom_scale, active
    *(_FLOAT,) * 6,  # beta2, 1 - beta1, 1 - beta2, eps, decay, prediction
)


class Backend:
    """What runs the updates in this process: resolved at the first call, then fixed."""

    __slots__ = ("accumulate", "adamw", "c_library", "moments", "path")

    def __init__(self, library: ctypes.CDLL | None, path: str | None) -> None:
        self.c_library = library
        self.path = path
        self.accumulate: Any = None  # ctypes functions are untyped
        self.moments: Any = None
        self.adamw: Any = None
        if library is not None:
            self.accumulate, self.moments, self.adamw = (
                _bound(library.zenflow_accumulate, _ACCUMULATE_TYPES),
                _bound(library.zenflow_moments, _MOMENTS_TYPES),
                _bound(library.zenflow_adamw, _ADAMW_TYPES),
            )


def _bound(function: Any, types: tuple[Any, ...]) -> Any:
    function.argtypes, function.restype = types, None
    return function


_resolve_lock = threading.Lock()


def resolve() -> Backend:
    """Return the process's backend; two threads' first calls must not both load and warn."""
    with _resolve_lock:
        return _load_backend()


@functools.cache
def _load_backend() -> Backend:
    library, path, reason = _load_library()
    if library is None:
        _logger.warning("host updates run on torch operations, slower than in C: %s", reason)
    return Backend(library, path)


def _load_library() -> tuple[ctypes.CDLL | None, str | None, str]:
    """Return the C library and its path, or (None, None, why there is none)."""
    choice = os.environ.get("ZENFLOW_KERNEL", "c")
    if choice not in _CHOICES:
        raise ValueError(f"ZENFLOW_KERNEL must be one of {_CHOICES}, but is {choice!r}: unset it")
    if choice == "torch":
        return None, None, "ZENFLOW_KERNEL=torch asks for it"
    spec = importlib.util.find_spec("zenflow.host._host_kernel")
    if spec is None or spec.origin is None:
        return None, None, "the C kernel is not built; reinstall with a C compiler present"
    try:
        library = ctypes.CDLL(spec.origin)
        interface = int(library.zenflow_interface())
    except (OSError, AttributeError) as error:
        return None, None, f"{spec.origin} does not load ({error}); reinstall the package"
    if interface != _INTERFACE:
        return None, None, f"{spec.origin} is built from other sources; reinstall the package"
    return library, spec.origin, ""
