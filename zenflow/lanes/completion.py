"""A piece of background work that others wait for: done, failed, or late. No torch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from zenflow.errors import DeadlineError, WorkerError


class Completion:
    """The end of one copy or one host computation.

    A completion is set once, by the thread that does the work; any thread may wait for it.
    On a GPU, "set" means launched: `device_event` then marks the end in the copy stream, and
    whoever sees the device pass it calls `passed`.
    """

    __slots__ = ("_event", "_followers", "_is_over", "_lock", "device_event", "error", "what")

    def __init__(self, what: str) -> None:
        """Make an open completion; `what` names the work in messages."""
        self.what = what
        self.error: BaseException | None = None
        self.device_event: Any = None
        self._event = threading.Event()
        self._is_over = False
        self._lock = threading.Lock()
        self._followers: list[Callable[[], None]] = []

    def set(self, device_event: Any = None) -> None:
        """Mark the work as done (on a GPU: as launched, ending at `device_event`)."""
        self.device_event = device_event
        self._event.set()
        if device_event is None:
            self.passed()

    def fail(self, error: BaseException) -> None:
        """Mark the work as failed; every waiter gets the error as a cause."""
        self.error = error
        self._event.set()
        self.passed()

    def passed(self) -> None:
        """Say that the data is there, or never will be."""
        with self._lock:
            self._is_over = True
            followers, self._followers = self._followers, []
        for follower in followers:
            follower()

    def then(self, follower: Callable[[], None]) -> None:
        """Call `follower` when the data is there or the work has failed, at once if it has."""
        with self._lock:
            if not self._is_over:
                self._followers.append(follower)
                return
        follower()

    def is_set(self) -> bool:
        """Whether the work has ended (on a GPU: has been launched), well or badly."""
        return self._event.is_set()

    def is_finished(self) -> bool:
        """Whether the data is there, or never will be; asks no device."""
        return self._is_over

    @property
    def blocks(self) -> bool:
        """Whether work that needs this one can't start: it is not over, or it has failed."""
        return not self._is_over or self.error is not None

    def wait_set(self, timeout: float) -> None:
        """Block until the work is set.

        Raises:
            WorkerError: The work failed; the cause is chained.
            DeadlineError: It was not set within `timeout` seconds.
        """
        if not self._event.wait(timeout):
            raise DeadlineError(
                f"waited {timeout:g} s for {self.what}, which has not ended: the host or the link "
                "is far slower than the steps need, or a thread hangs. Raise wait_timeout if "
                "that is expected"
            )
        if self.error is not None:
            raise WorkerError(
                f"{self.what} failed ({type(self.error).__name__}: {self.error}). The optimizer "
                "can't go on: resume from the last checkpoint once the cause is mended"
            ) from self.error

    def wait(self, timeout: float) -> None:
        """Block until the data is there; errors as in `wait_set`."""
        self.wait_set(timeout)
        if self.device_event is not None:
            self.device_event.synchronize()


def finished(what: str = "nothing") -> Completion:
    """Return a completion that is already set."""
    completion = Completion(what)
    completion.set()
    return completion


def wait_all(completions: Sequence[Completion], timeout: float) -> float:
    """Wait for every completion in turn and return the seconds it took."""
    started = time.perf_counter()
    for completion in completions:
        completion.wait(timeout)
    return time.perf_counter() - started
