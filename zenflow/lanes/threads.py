"""The end of the engine's own threads."""

from __future__ import annotations

import threading

MOST_SECONDS = 5.0
"""Seconds for which a thread's end is waited for. One that hangs is left behind."""


def join(thread: threading.Thread) -> None:
    """Wait for a thread's end, if it was begun.

    The garbage collector may close an optimizer in any thread, one of its own too: that one ends
    when it comes to it.
    """
    if thread.ident is not None and thread is not threading.current_thread():
        thread.join(MOST_SECONDS)
