"""Patience: a line on standard error where an answer takes more than two seconds."""

from __future__ import annotations

import sys
import threading
import time

_AFTER = 2.0
"""Seconds before the first line; each later one takes twice as long to come."""


class Patience:
    """Shows the progress of a command that computes; silent where that is quick."""

    def __init__(self, what: str, *, after: float = _AFTER) -> None:
        """Say nothing yet.

        Args:
            what: What is going on, in words.
            after: Seconds before the first line.
        """
        self._what = what
        self._after = after
        self._done = ""
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._wait, daemon=True)

    def __enter__(self) -> Patience:
        """Begin to wait."""
        self._thread.start()
        return self

    def __exit__(self, *unused: object) -> None:
        """Say nothing more."""
        self._end.set()
        self._thread.join()

    def update(self, done: str) -> None:
        """Note the progress so far, in words."""
        self._done = f": {done}"

    def _wait(self) -> None:
        begun, pause = time.monotonic(), self._after
        while not self._end.wait(pause):
            seconds = time.monotonic() - begun
            print(f"{self._what}{self._done}, {seconds:.0f} s so far ...", file=sys.stderr)
            pause *= 2
