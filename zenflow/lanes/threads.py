"""The begin and the end of the engine's own threads."""

from __future__ import annotations

import threading

import psutil

MOST_SECONDS = 5.0
"""Seconds to wait for a thread's end. A thread that hangs is left behind."""


def start(thread: threading.Thread) -> None:
    """Start a thread.

    Raises:
        RuntimeError: The system gives no more.
    """
    try:
        thread.start()
    except RuntimeError as error:
        raise RuntimeError(
            f"the system gives no thread for {thread.name}, beside the "
            f"{psutil.Process().num_threads()} that this process has: choose fewer host_threads, "
            "or raise the limit on processes (ulimit -u, or the container's)"
        ) from error


def join(thread: threading.Thread) -> None:
    """Wait for a thread's end, if the thread was started.

    The garbage collector may close an optimizer in any thread, even in one of its own. A thread
    does not wait for itself.
    """
    if thread.ident is not None and thread is not threading.current_thread():
        thread.join(MOST_SECONDS)
