"""WeightStream: moves pages between their homes and the device.

A page comes before its layer's forward and again before its backward. Then the step's last
gradients have moved its weights, and they go home. Few pages are here at a time. The page that is
given up is the one whose layer is farthest from the one at work: layers are used in a zigzag, so
that its next use is last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, Protocol

import torch

from zenflow.device.base import AbstractDevice
from zenflow.errors import DeadlineError, WorkerError
from zenflow.lanes.completion import Completion
from zenflow.lanes.copies import Copy, CopyLane, PacedDirection
from zenflow.lanes.lease import Lease, take
from zenflow.report import readable
from zenflow.streaming.page import Page
from zenflow.trace.recorder import Recorder

UP = "weights h2d"
"""Lane of the weights that come to the device. Behind updates that the host has not computed yet
weights would be late, so that they have lanes of their own."""
DOWN = "weights d2h"
"""Lane of the weights that go home."""


class Sums(Protocol):
    """Gradients that wait at home for a step's further micro-batches."""

    def fetch(self, page: Page) -> None:
        """Start to bring a page's sums back."""

    def restore(self, page: Page) -> None:
        """Put a page's sums in place, before its backward adds to them."""


class WeightStream:
    """Pages of a model's layers, the lanes that move them, and who is where.

    Attributes:
        device: Device that the weights visit.
        pages: The pages, in the order of forward.
        slots: Largest number of pages that are here, or come, at a time.
        keeps: Whether pages stay here after their use, for training has them twice in a row.
            Without, they are given up at once, so that whoever writes to weights does so at home.
        most_here: Largest number of pages that have been here, or coming, at a time.
        num_fetches: Number of times that a page has come.
        up_bytes: Number of bytes that have come.
        down_bytes: Number of bytes that have gone home.
        step: Number of the step under way, for the copies' spans.
        sums: Gradients that wait at home; None without.
        has_optimizer: Whether an optimizer moves the weights of trained pages.
        waiting: Context that counts waits for pages as stall.
        staying_bytes: Bytes of the model's parameters that stay on the device.
        ending: Gets a callback to undo each change of the model.
    """

    def __init__(self, device: AbstractDevice, *, slots: int, wait_timeout: float) -> None:
        """Start the lanes, without a page.

        Args:
            device: Device that the weights visit.
            slots: Largest number of pages that are here, or come, at a time.
            wait_timeout: Seconds after which a wait is an error.
        """
        self.device, self.slots = device, slots
        self.pages: list[Page] = []
        self.keeps = False
        self.most_here = self.num_fetches = self.up_bytes = self.down_bytes = 0
        self.step = 0
        self._taken_bytes = (0, 0)
        self.sums: Sums | None = None
        self.has_optimizer = False
        self.staying_bytes = 0
        self._wait_timeout = wait_timeout
        self._here: list[Page] = []
        self._at_work: Page | None = None
        self._num_marks = 0
        self._evicted: tuple[int, Any] = (0, device.mark())
        self.waiting: Callable[[], AbstractContextManager[None]] = nullcontext
        self.ending = ExitStack()
        self._recorder = Recorder(0, device.seconds_of)
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

    def __str__(self) -> str:
        """Return the bytes that are streamed, visit and stay, in a line each."""
        sizes = sorted((page.num_bytes for page in self.pages), reverse=True)
        rows = [
            ("streamed", sum(sizes), f"{len(sizes)} layers at home, in pinned host memory"),
            ("visiting", sum(sizes[: self.slots]), f"at most {self.slots} layers on the device"),
            ("staying", self.staying_bytes, f"on {self.device.torch_device}"),
        ]
        return "\n".join(f"{name:<9}{readable(size):>8}   {note}" for name, size, note in rows)

    def add(self, page: Page) -> None:
        """Take a page in, which is at home."""
        page.stream = self
        self.pages.append(page)
        self.ending.callback(page.forget)

    # ---- use by layers ------------------------------------------------------------------------

    def begin(self, page: Page, *, backward: bool) -> None:
        """Have a page here for its layer's forward or backward, and let the next one come."""
        if page is not self._at_work:
            self.end()  # of the layer before, which may have been broken off
        self._bring(page)
        self._at_work = page
        if backward and self.sums is not None:
            self.sums.restore(page)
        following = page.index + (-1 if backward else 1)
        if 0 <= following < len(self.pages):
            self._fetch(self.pages[following])
            if backward and self.sums is not None:
                self.sums.fetch(self.pages[following])
        elif not backward and self.sums is not None:  # this page's backward comes first
            self.sums.fetch(page)

    def end(self) -> None:
        """Note that the layer at work has done with its weights."""
        page, self._at_work = self._at_work, None
        if page is not None:
            self._release(page)

    def _release(self, page: Page) -> None:
        self._num_marks += 1
        page.released = self._num_marks, self.device.mark()
        if not self.keeps and not page.holders:
            self.evict(page)

    @contextmanager
    def held(self, page: Page, *, changes: bool) -> Iterator[None]:
        """Have a page here inside of a `with` block, beside the layer at work."""
        self._bring(page)
        page.holders += 1
        if changes:
            self._order_writes(page)
            page.is_changed = True
        try:
            yield
        finally:
            page.holders -= 1
            if page is not self._at_work and not page.holders:
                self._release(page)

    def leave(self, page: Page) -> None:
        """Note that all gradients of a page are on their way; changed weights go home."""
        page.left_in = backward_number()
        page.in_graph = False
        self.send_home(page)

    def end_step(self, step: int) -> None:
        """Note that a step is over, and no graph of autograd is kept.

        Weights that are away can be read again.

        Args:
            step: Number of the step.
        """
        self.end()
        self.step = step + 1
        for page in self.pages:
            if page.in_graph:
                page.in_graph = False
                if not page.is_here:
                    page.show_at_home()

    # ---- coming -------------------------------------------------------------------------------

    def _bring(self, page: Page) -> None:
        if not page.is_here:
            self._fetch(page)
            assert page.coming is not None
            with self.waiting():
                page.coming.wait_launched(self._wait_timeout)
                self.device.order_after(page.coming)
            page.coming, page.is_here = None, True
            page.show_on_device()
            page.device_is_stale = page.home_is_stale
        if page.device_is_stale and page.newer is not None:
            page.device_is_stale = False
            self._order_writes(page)
            page.newer()

    def _order_writes(self, page: Page) -> None:
        """Let compute that writes to a page wait for copies that read or write it."""
        for user in page.lease.users:
            user.wait_launched(self._wait_timeout)
            self.device.order_after(user)

    def _fetch(self, page: Page) -> None:
        """Let a page come, unless it is here or on its way."""
        if page.is_here or page.coming is not None:
            return
        self._make_space(page)
        self.device.resize(page.on_device, page.num_bytes, UP, self._evicted[1])
        # Whoever wrote to its home has ended: the page was given up behind that.
        page.coming = self._submit(self.up, page, None, fills=[page.lease])
        self.num_fetches += 1
        self._here.append(page)
        self.most_here = max(self.most_here, len(self._here))

    def _submit(
        self,
        lane: CopyLane,
        page: Page,
        mark: Any,
        *,
        reads: Sequence[Lease] = (),
        fills: Sequence[Lease] = (),
    ) -> Completion:
        done = Completion(f"the weights of layer {page.index} ({lane.name})")
        jobs = page.pairs if lane is self.up else [(there, home) for home, there in page.pairs]
        lane.submit(
            Copy(
                run=partial(self.device.transfer, lane.name, jobs, mark),
                after=take(done, reads=reads, fills=fills),
                completion=done,
                num_bytes=page.num_bytes,
                step=self.step,
            )
        )
        self.count(lane, page.num_bytes)
        return done

    def count(self, lane: CopyLane, num_bytes: int) -> None:
        """Count bytes that a lane moves."""
        if lane is self.up:
            self.up_bytes += num_bytes
        else:
            self.down_bytes += num_bytes

    def take_bytes(self) -> tuple[int, int]:
        """Return the bytes that have come, and gone home, since the last call."""
        total = self.up_bytes, self.down_bytes
        up, down = (now - before for now, before in zip(total, self._taken_bytes, strict=True))
        self._taken_bytes = total
        return up, down

    # ---- going --------------------------------------------------------------------------------

    def _make_space(self, wanted: Page) -> None:
        """Give up pages that are not in use, the farthest first, until one more may come."""
        while len(self._here) >= self.slots:
            idle = [p for p in self._here if p is not self._at_work and not p.holders]
            if not idle:
                return  # more are held than there are slots
            self.evict(max(idle, key=lambda page: abs(page.index - wanted.index)))

    def evict(self, page: Page) -> None:
        """Give up the device's copy of a page that is not in use; changes are at home then."""
        if page not in self._here:
            return
        if page.is_changed:
            self.send_home(page)
        with self.waiting():
            for user in page.lease.users:
                user.wait_done(self._wait_timeout)
        page.coming, page.is_here = None, False
        page.show_at_home()
        self._evicted = max(self._evicted, page.released, key=lambda mark: mark[0])
        self.device.resize(page.on_device, 0, UP, self._evicted[1])
        page.lease = Lease()
        self._here.remove(page)

    def send_home(self, page: Page) -> None:
        """Start the way home of weights that have changed."""
        if not page.is_changed:
            return
        self._submit(self.down, page, self.device.mark(), reads=[page.lease])
        page.lease.renew()
        page.is_changed = False
        page.home_is_stale = page.device_is_stale

    def settle(self, page: Page) -> None:
        """Bring a page home whole, so that anybody may read and write its parameters there."""
        page.in_graph = False
        if page.home_is_stale:
            with self.held(page, changes=True):
                pass
        self.evict(page)
        page.show_at_home()

    def rest(self) -> None:
        """Bring all pages home, where a program may write to them, until they are used again."""
        self.settle_all()
        self.keeps = False

    def settle_all(self) -> None:
        """Bring all pages home."""
        self.end()
        for page in self.pages:
            self.settle(page)

    # ---- life with an optimizer ---------------------------------------------------------------

    def start_training(self) -> None:
        """Let pages stay here after their use: an optimizer is made, and nobody else writes."""
        self.has_optimizer = self.keeps = True

    def work_for(
        self,
        recorder: Recorder,
        waiting: Callable[[], AbstractContextManager[None]],
        *,
        up: PacedDirection | None,
        down: PacedDirection | None,
        newer: Mapping[Page, Callable[[], None]],
    ) -> None:
        """Serve an engine, which moves trained weights while they are here.

        Args:
            recorder: Keeps the copies' spans.
            waiting: Context that counts waits for pages as stall.
            up: Emulated link to the device, with the engine's own lane; None for none.
            down: Emulated link to the host, alike.
            newer: Function that writes each page's important columns.
        """
        self.step, self.waiting = 1, waiting
        for lane, paced in ((self.up, up), (self.down, down)):
            lane.recorder, lane.paced = recorder, paced
        for page, write in newer.items():
            page.newer = write

    def stop_training(self) -> None:
        """Serve no engine any more: its threads have ended. All weights go home as they are."""
        self.waiting, self.sums = nullcontext, None
        for lane in (self.up, self.down):
            lane.recorder, lane.paced = self._recorder, None
        for page in self._here:  # copies that failed with the engine are made again
            for user in page.lease.users:
                with suppress(WorkerError, DeadlineError):
                    user.wait_done(self._wait_timeout)
            page.lease = Lease()
            page.is_changed = page.is_trained
        self.settle_all()
        for page in self.pages:
            page.newer = None
        self.has_optimizer = self.keeps = False

    def close(self) -> None:
        """Bring all pages home, and leave the model with its weights there, as plain memory.

        Raises:
            RuntimeError: An optimizer still trains the weights.
        """
        if self.has_optimizer:
            raise RuntimeError("an optimizer trains the streamed weights: close() that one first")
        self.settle_all()
        self.ending.close()
        self.up.close()
        self.down.close()
        self.device.close()


def backward_number() -> int:
    """Return the number of the backward that the calling thread is in; -1 outside of any.

    A layer that is computed again for its backward, as checkpointing has it, is inside.
    `torch.utils.checkpoint` asks in the same way.
    """
    return int(torch._C._current_graph_task_id())
