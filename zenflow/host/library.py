"""The compiled C code: found, loaded and bound once in a process; or the reason for none."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import threading
from pathlib import Path
from typing import Any

_logger = logging.getLogger(__name__)

_INTERFACE = 9  # the one the C file declares; raised with every change of a signature
_CHOICES = ("c", "torch")
_FILE = Path(__file__).with_name("_host_kernel.so")

_POINTER, _INT, _LONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
# Result and arguments of each function.
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "zenflow_instruction_set": (ctypes.c_char_p, ()),
    "zenflow_run": (None, (_POINTER, _LONG, _LONG)),
    "zenflow_gather_marked": (_LONG, (_POINTER, _POINTER, _LONG, _LONG, _LONG)),
    "zenflow_pool_open": (_POINTER, (_INT,)),
    "zenflow_pool_run": (None, (_POINTER, _POINTER, _LONG, _LONG)),
    "zenflow_pool_close": (None, (_POINTER,)),
}


def bound(library: ctypes.CDLL) -> ctypes.CDLL:
    """Return the library with the types of its functions."""
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


_lock = threading.Lock()


def c_library() -> ctypes.CDLL | None:
    """Return the loaded C code, or None where updates run on torch operations."""
    with _lock:  # two threads' first calls must not both load and warn
        return _load()


def description() -> str:
    """Return the kernel in words: C and its instruction set, or torch operations and the reason.

    Raises:
        ValueError: `ZENFLOW_KERNEL` is neither `c` nor `torch`.
    """
    library, reason = _load_library()
    if library is None:
        return f"torch operations ({reason})"
    return f"C ({bound(library).zenflow_instruction_set().decode()})"


@functools.cache
def _load() -> ctypes.CDLL | None:
    library, reason = _load_library()
    if library is None:
        _logger.warning("host updates run on torch operations, slower than in C: %s", reason)
        return None
    return bound(library)


def _load_library() -> tuple[ctypes.CDLL | None, str]:
    """Return the C library, or None and the reason."""
    choice = os.environ.get("ZENFLOW_KERNEL", "c")
    if choice not in _CHOICES:
        raise ValueError(f"ZENFLOW_KERNEL must be one of {_CHOICES}, but is {choice!r}: unset it")
    if choice == "torch":
        return None, "ZENFLOW_KERNEL=torch asks for it"
    if not _FILE.is_file():
        return None, "the C kernel is not built; reinstall with a C compiler present"
    try:
        library = ctypes.CDLL(str(_FILE))
        interface = int(library.zenflow_interface())
    except (OSError, AttributeError) as error:
        return None, f"{_FILE} does not load ({error}); reinstall the package"
    if interface != _INTERFACE:
        return None, f"{_FILE} is built from other sources; reinstall the package"
    return library, ""
