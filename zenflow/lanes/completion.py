"""A piece of background work that others wait for: launched, then done, failed, or late."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from zenflow.errors import DeadlineError, WorkerError


class Completion:
    """The end of one copy or one host computation.

    - *launched*: the thread that does the work has said so. Any thread may wait for it.
    - *done*: the data is there, or never will be.

    Both states come together where nothing is asynchronous. On a GPU a launched copy ends at
    `device_event` in the copy stream; the thread that sees the event pass calls `mark_done`.

    Attributes:
        what: Name of the work in messages.
        is_done: Whether the data is there, or never will be; asks no device.
        has_succeeded: Whether the data is there, so that work that needs it can start.
        error: Error by which the work failed; None where it has not.
        device_event: End of the work in a stream; None where there is no stream.
    """

    __slots__ = (
        *("_followers", "_is_launched", "_lock", "_waiters"),
        *("device_event", "error", "has_succeeded", "is_done", "what"),
    )

    def __init__(self, what: str) -> None:
        """Make an open completion; `what` names the work in messages."""
        self.what = what
        self.error: BaseException | None = None
        self.device_event: Any = None
        self.is_done = self.has_succeeded = False
        self._is_launched = False
        self._lock = threading.Lock()
        # Nobody waits for most of them: an event for each would cost more than all the rest.
        self._waiters: list[threading.Event] = []
        self._followers: list[Callable[[], None]] = []

    def mark_launched(self, device_event: Any) -> None:
        """Note that the work is launched; it is done when the device passes `device_event`."""
        self.device_event = device_event
        with self._lock:
            self._is_launched = True
            waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.set()

    def mark_done(self) -> None:
        """Note that the data is there."""
        with self._lock:
            self._is_launched = self.is_done = True
            self.has_succeeded = self.error is None
            waiters, self._waiters = self._waiters, []
            followers, self._followers = self._followers, []
        for waiter in waiters:
            waiter.set()
        for follower in followers:
            follower()

    def fail(self, error: BaseException) -> None:
        """Mark the work as failed; every waiter gets the error as a cause."""
        self.error = error
        self.mark_done()

    def when_done(self, follower: Callable[[], None]) -> None:
        """Call `follower` when the data is there or the work has failed, at once if it has."""
        with self._lock:
            if not self.is_done:
                self._followers.append(follower)
                return
        follower()

    def wait_launched(self, timeout: float) -> None:
        """Block until the work is launched; on a CPU it is done then.

        Raises:
            WorkerError: The work failed; the cause is chained.
            DeadlineError: It was not launched within `timeout` seconds.
        """
        launched = None
        with self._lock:
            if not self._is_launched:
                launched = threading.Event()
                self._waiters.append(launched)
        self._check(launched is None or launched.wait(timeout), timeout)

    def _check(self, is_there: bool, timeout: float) -> None:
        """Raise the errors that `wait_launched` documents."""
        if not is_there:
            raise DeadlineError(
                f"waited {timeout:g} s for {self.what}, which has not ended: the host or the link "
                "is far slower than the steps need, a thread hangs, or another rank does not take "
                "the same steps. Raise wait_timeout if that is expected"
            )
        if self.error is not None:
            raise WorkerError(
                f"{self.what} failed ({type(self.error).__name__}: {self.error}). The optimizer "
                "can't go on: resume from the last checkpoint once the cause is mended"
            ) from self.error

    def wait_done(self, timeout: float) -> None:
        """Block until the data is there; errors as in `wait_launched`."""
        deadline = time.monotonic() + timeout
        self.wait_launched(timeout)
        if self.device_event is None:
            return
        # Whoever watches the device says so. CUDA's own wait for an event has no deadline.
        done = threading.Event()
        self.when_done(done.set)
        self._check(done.wait(max(0.0, deadline - time.monotonic())), timeout)


def already_done() -> Completion:
    """Return the completion of work that is done."""
    completion = Completion("nothing")
    completion.mark_done()
    return completion


def wait_all(completions: Iterable[Completion], timeout: float) -> None:
    """Block until all of the work is done; errors as in `Completion.wait_launched`."""
    for completion in completions:
        completion.wait_done(timeout)


def unique(completions: Iterable[Completion | None]) -> list[Completion]:
    """Return each completion once, in order."""
    return list(dict.fromkeys(filter(None, completions)))
