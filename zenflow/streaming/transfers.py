"""Transfers: two lanes that move whole tensors, beside the engine's own lanes.

Weights that visit the device, and sums of gradients that wait at home, take these. Behind updates
that the host has not computed yet they would be late.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

from torch import Tensor

from zenflow.device.base import AbstractDevice
from zenflow.errors import DeadlineError, WorkerError
from zenflow.lanes.completion import Completion
from zenflow.lanes.copies import Copy, CopyLane, PacedDirection
from zenflow.lanes.lease import Lease, take
from zenflow.trace.recorder import Recorder

UP = "weights h2d"
"""Name of the lane to the device."""
DOWN = "weights d2h"
"""Name of the lane to the host."""


class Transfers:
    """The two lanes, and the bytes that they have moved.

    Attributes:
        device: Device at one end of the lanes.
        up: Lane to the device.
        down: Lane to the host.
        up_bytes: Number of bytes that have come to the device.
        down_bytes: Number of bytes that have gone to the host.
        step: Number of the step under way, for the copies' spans.
    """

    def __init__(self, device: AbstractDevice, *, wait_timeout: float) -> None:
        """Start the lanes.

        Args:
            device: Device at one end.
            wait_timeout: Seconds after which a wait is an error.
        """
        self.device, self.step = device, 0
        self.up_bytes = self.down_bytes = 0
        self._taken_bytes = (0, 0)
        self._wait_timeout = wait_timeout
        self._recorder = Recorder(0, device.seconds_of)
        self._waiting: Callable[[], AbstractContextManager[None]] = nullcontext
        self.up, self.down = (
            CopyLane(
                *(lane, "weights", self._recorder),
                wait_timeout=wait_timeout,
                enter_thread=device.enter_thread,
            )
            for lane in (UP, DOWN)
        )
        for lane in (self.up, self.down):
            device.open_lane(lane.name)
            lane.start()

    def submit(
        self,
        lane: CopyLane,
        what: str,
        jobs: Sequence[tuple[Tensor, Tensor]],
        *,
        after: Any = None,
        reads: Sequence[Lease] = (),
        fills: Sequence[Lease] = (),
        keeps: Sequence[Tensor] = (),
    ) -> Completion:
        """Queue copies between device and host as one job, and return its end.

        Args:
            lane: One of the two lanes.
            what: Name of the content, for errors.
            jobs: (source, target) each, of one shape and dtype.
            after: A mark of the compute that has used the memory before; None for none.
            reads: Leases of memory that is read.
            fills: Leases of memory that is written.
            keeps: Compute's memory that may be freed before the copies are over.
        """
        done = Completion(f"{what} ({lane.name})")
        num_bytes = sum(source.nbytes for source, _ in jobs)

        def run() -> Any:
            span = self.device.transfer(lane.name, jobs, after)
            if keeps:
                self.device.keep(keeps, lane.name)
            return span

        lane.submit(Copy(run, take(done, reads=reads, fills=fills), done, num_bytes, self.step))
        if lane is self.up:
            self.up_bytes += num_bytes
        else:
            self.down_bytes += num_bytes
        return done

    def wait(self, copied: Completion) -> None:
        """Let compute launched from now on wait for a copy; the host's wait counts as stall."""
        with self._waiting():
            copied.wait_launched(self._wait_timeout)
            self.device.order_after(copied)

    def wait_for_users(self, lease: Lease) -> None:
        """Wait on the host until nobody uses some memory; the wait counts as stall."""
        with self._waiting():
            for user in lease.users:
                user.wait_done(self._wait_timeout)

    def order_after_users(self, lease: Lease) -> None:
        """Let compute launched from now on wait for all users of some memory."""
        for user in lease.users:
            user.wait_launched(self._wait_timeout)
            self.device.order_after(user)

    def take_bytes(self, step: int) -> tuple[int, int]:
        """Return the bytes that have come, and gone to the host, in a step that is over."""
        self.step = step + 1
        total = self.up_bytes, self.down_bytes
        up, down = (now - before for now, before in zip(total, self._taken_bytes, strict=True))
        self._taken_bytes = total
        return up, down

    def work_for(
        self,
        recorder: Recorder,
        waiting: Callable[[], AbstractContextManager[None]],
        *,
        up: PacedDirection | None,
        down: PacedDirection | None,
    ) -> None:
        """Serve an engine from its first step on.

        Args:
            recorder: Keeps the copies' spans.
            waiting: Context that counts waits as stall.
            up: Emulated link to the device, with the engine's own lane; None for none.
            down: Emulated link to the host, alike.
        """
        self.step, self._waiting = 1, waiting
        for lane, paced in ((self.up, up), (self.down, down)):
            lane.recorder, lane.paced = recorder, paced

    def leave_engine(self) -> None:
        """Serve no engine any more, whose memory may go."""
        self._waiting = nullcontext
        for lane in (self.up, self.down):
            lane.recorder, lane.paced = self._recorder, None
            with suppress(WorkerError, DeadlineError):  # of copies that failed with the engine
                lane.last.wait_done(self._wait_timeout)

    def close(self) -> None:
        """End the lanes behind the copies that were queued."""
        self.up.close()
        self.down.close()
