"""Copy lanes: one thread per direction that moves columns between device and host, in order.

A lane is a first-in first-out queue. Its thread waits for a copy's conditions on the host (a free
staging buffer, a computed update); events order the copy after work of the device. On a GPU the
thread only launches work on its own stream; on a CPU it does the copying itself.
"""

from __future__ import annotations

import heapq
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from zenflow.lanes.completion import Completion, already_done
from zenflow.lanes.threads import join, start
from zenflow.trace.recorder import Recorder


@dataclass(frozen=True, slots=True)
class PacedLink:
    """An emulated link for a CPU device: a copy takes at least bytes / bandwidth seconds.

    Everything measured over a paced link is emulated, and outputs must say so.

    Raises:
        ValueError: A bandwidth is not positive.
    """

    d2h_bytes_per_second: float
    """Bandwidth from the device to the host, in bytes per second."""
    h2d_bytes_per_second: float
    """Bandwidth from the host to the device, in bytes per second."""

    def __post_init__(self) -> None:
        """Refuse bandwidths that are not positive."""
        for name in ("d2h_bytes_per_second", "h2d_bytes_per_second"):
            value = getattr(self, name)
            if not value > 0:
                raise ValueError(
                    f"{name} must be positive, got {value}: leave `link` out for no pacing"
                )


class PacedDirection:
    """One direction of an emulated link; copies under way share its bandwidth equally.

    A GPU copies matrix by matrix, and gradients in pieces. So lanes of one direction take turns,
    and none of them waits for the whole of what another one moves.
    """

    def __init__(self, bytes_per_second: float) -> None:
        """Start with a free link of so many bytes per second."""
        self.bytes_per_second = bytes_per_second
        self._lock = threading.Lock()
        # Bytes that a copy without an end would have had by now, and a heap of what it will have
        # had at the ends of those under way.
        self._carried = 0.0
        self._ends: list[float] = []
        self._since = time.perf_counter()

    @contextmanager
    def carrying(self, num_bytes: int) -> Iterator[None]:
        """Let a `with` block last until the link has carried the bytes of a copy, at least."""
        with self._lock:
            self._advance()
            end = self._carried + num_bytes
            heapq.heappush(self._ends, end)
        yield
        while (remaining := self._remaining(end)) > 0:
            time.sleep(remaining)

    def _advance(self) -> None:
        """Carry all copies to the present."""
        now = time.perf_counter()
        while self._ends:
            rate = self.bytes_per_second / len(self._ends)
            first_end = self._since + (self._ends[0] - self._carried) / rate
            if first_end > now:
                self._carried += (now - self._since) * rate
                break
            self._since, self._carried = first_end, heapq.heappop(self._ends)
        self._since = now

    def _remaining(self, end: float) -> float:
        """Return the seconds until a copy's end, unless another one begins before."""
        with self._lock:
            self._advance()
            seconds, carried = 0.0, self._carried
            for place, other in enumerate(ends := sorted(self._ends)):
                if other > end:
                    break
                seconds += (other - carried) * (len(ends) - place) / self.bytes_per_second
                carried = other
            return seconds


@dataclass(slots=True)
class Copy:
    """One job of a lane."""

    run: Callable[[], Any]
    """Function that does the copy on a CPU and returns None, or launches it on a GPU and returns
    the events that enclose it."""
    after: Sequence[Completion]
    """Host-side work that must be done before the copy begins."""
    completion: Completion
    """End of this copy."""
    num_bytes: int | Callable[[], int]
    """Number of bytes that the copy moves; or a function that gets the copy ready once `after` is
    done, and returns the number."""
    step: int
    """Number of the step that the copy belongs to."""


class CopyLane:
    """A thread that performs copies in one direction, one after another.

    Owned by the optimizer; `start` begins the thread and `close` ends it. An error in a copy fails
    that copy's completion, and thereby the next step.
    """

    def __init__(
        self,
        name: str,
        span_name: str,
        recorder: Recorder,
        *,
        paced: PacedDirection | None = None,
        wait_timeout: float,
        enter_thread: Callable[[str | None], None],
    ) -> None:
        """Make a lane without a thread.

        Args:
            name: One of `zenflow.trace.span.LANES`.
            span_name: Name of its copies in a timeline.
            recorder: Keeps their spans.
            paced: Direction of an emulated link that carries them; None does not pace the lane.
            wait_timeout: Seconds after which a wait is an error.
            enter_thread: Called first by each of its threads, with the name by the one that
                copies.
        """
        self.name = name
        self._span_name = span_name
        self.recorder = recorder
        self.paced = paced
        self._wait_timeout = wait_timeout
        self._enter_thread = enter_thread
        self.last = already_done()
        """Completion of the last copy that was queued. All earlier copies are done when it is."""
        self._jobs: queue.SimpleQueue[Copy | None] = queue.SimpleQueue()
        self._launched: queue.SimpleQueue[Completion | None] = queue.SimpleQueue()
        self._watcher: threading.Thread | None = None
        self._thread = threading.Thread(target=self._loop, name=f"zenflow-{name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        start(self._thread)

    def submit(self, copy: Copy) -> None:
        """Queue a copy behind those queued before."""
        self.last = copy.completion
        self._jobs.put(copy)

    def _loop(self) -> None:
        self._enter_thread(self.name)
        with torch.no_grad():
            while (copy := self._jobs.get()) is not None:
                try:
                    self._perform(copy)
                except BaseException as error:  # noqa: BLE001 - reaches step() by the completion
                    copy.completion.fail(error)
                del copy  # holds the gradient: free it before waiting for the next job

    def _perform(self, copy: Copy) -> None:
        for completion in copy.after:
            completion.wait_done(self._wait_timeout)
        started = time.perf_counter()
        num_bytes = copy.num_bytes if isinstance(copy.num_bytes, int) else copy.num_bytes()
        with nullcontext() if self.paced is None else self.paced.carrying(num_bytes):
            events = copy.run()
        start, end = events or (started, time.perf_counter())
        self.recorder.add(self.name, self._span_name, start, end, copy.step, num_bytes)
        if events is None:
            copy.completion.mark_done()
        else:
            copy.completion.mark_launched(end)
            self._watch(copy.completion)

    def _watch(self, launched: Completion) -> None:
        """Let a second thread wait for the device's copy, while the lane's own launches more.

        The second thread tells the host's threads by a call. If these polled the device instead,
        they would take the interpreter from the thread that launches backward.
        """
        if self._watcher is None:
            watcher = threading.Thread(
                target=self._see_done, name=f"zenflow-{self.name}-end", daemon=True
            )
            start(watcher)
            self._watcher = watcher
        self._launched.put(launched)

    def _see_done(self) -> None:
        self._enter_thread(None)
        while (launched := self._launched.get()) is not None:
            try:
                launched.device_event.synchronize()
            except BaseException as error:  # noqa: BLE001 - reaches step() by the completion
                launched.fail(error)
            else:
                launched.mark_done()

    def close(self) -> None:
        """End the thread after the copies queued before."""
        self._jobs.put(None)
        join(self._thread)
        if self._watcher is not None:
            self._launched.put(None)
            join(self._watcher)
