"""WeightStream: moves pages between their homes and the device.

A page comes before its layer's forward and again before its backward. Then the step's last
gradients have moved its weights, and they go home. Few pages are here at a time. The page that is
given up is the one whose layer is farthest from the one at work: layers are used in a zigzag, so
that its next use is last.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch

from zenflow.device.base import AbstractDevice
from zenflow.errors import DeadlineError, WorkerError
from zenflow.lanes.lease import Lease
from zenflow.report import readable
from zenflow.rule.sizes import spread
from zenflow.streaming.page import Page
from zenflow.streaming.transfers import UP, Transfers

_log = logging.getLogger(__name__)

STEPS_SEEN = 2
"""Number of steps after which the device's use of memory counts as known."""
FILLED = 0.9
"""Fraction of the device's memory that layers which stay may fill."""


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
        transfers: Lanes that move the weights.
        lets_stay: Whether layers stay on the device for which steps have shown it to have room.
        has_optimizer: Whether an optimizer moves the weights of trained pages.
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
        self.most_here = self.num_fetches = 0
        self.lets_stay = self.has_optimizer = False
        self.staying_bytes = 0
        self._num_steps = self._most_used = self._need = 0
        self._wait_timeout = wait_timeout
        self._here: list[Page] = []
        self._at_work: Page | None = None
        self._num_marks = 0
        self._evicted: tuple[int, Any] = (0, device.mark())
        self.ending = ExitStack()
        self.transfers = Transfers(device, wait_timeout=wait_timeout)

    def __str__(self) -> str:
        """Return the bytes that are streamed, visit and stay, in a line each."""
        sizes = sorted((page.num_bytes for page in self.pages), reverse=True)
        more = ", and layers for which it has room" if self.lets_stay else ""
        rows = [
            ("streamed", sum(sizes), f"{len(sizes)} layers at home, in pinned host memory"),
            ("visiting", sum(sizes[: self.slots]), f"at most {self.slots} layers on the device"),
            ("staying", self.staying_bytes, f"on {self.device.torch_device}{more}"),
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
        following = page.index + (-1 if backward else 1)
        if 0 <= following < len(self.pages):
            self._fetch(self.pages[following])

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
            self.transfers.order_after_users(page.lease)
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
        if page.stays:
            page.lease.renew()  # forgets users that have ended
        else:
            self.send_home(page)

    def end_step(self) -> None:
        """Note that a step is over, and no graph of autograd is kept.

        Weights that are away can be read again.
        """
        self.end()
        self._num_steps += 1
        if self.lets_stay and self._num_steps >= STEPS_SEEN:
            self._choose_staying()
        for page in self.pages:
            if page.in_graph:
                page.in_graph = False
                if not page.is_here:
                    page.show_at_home()

    def _choose_staying(self) -> None:
        """Let as many layers stay as fit beside all that steps have needed so far.

        A step that needs more takes places back, which is why some memory is left free.
        """
        use = self.device.memory_use()
        if use is None or not self.pages:
            return
        most, limit = use
        staying = [page for page in self.pages if page.stays]
        if most > self._most_used:
            self._most_used = most
            rest = most - sum(page.num_bytes for page in staying)
            self._need = max(self._need, rest)
        spare = int(FILLED * limit) - self._need
        largest = max(page.num_bytes for page in self.pages)
        count = min(max(0, spare) // largest, len(self.pages))
        if count != len(staying) and not (staying and count > len(staying)):
            places = spread(len(self.pages), count)
            for page in self.pages:
                page.stays = page.index in places
            _log.info("%d of %d streamed layers stay on the device", count, len(self.pages))

    # ---- coming -------------------------------------------------------------------------------

    def _bring(self, page: Page) -> None:
        if not page.is_here:
            self._fetch(page)
            assert page.coming is not None
            self.transfers.wait(page.coming)
            page.coming, page.is_here = None, True
            page.show_on_device()
            page.device_is_stale = page.home_is_stale
        if page.device_is_stale and page.newer is not None:
            page.device_is_stale = False
            self.transfers.order_after_users(page.lease)
            page.newer()

    def _fetch(self, page: Page) -> None:
        """Let a page come, unless it is here or on its way."""
        if page.is_here or page.coming is not None:
            return
        self._make_space(page)
        self.device.resize(page.on_device, page.num_bytes, UP, self._evicted[1])
        # Whoever wrote to its home has ended: the page was given up behind that.
        page.coming = self.transfers.submit(
            *(self.transfers.up, f"the weights of layer {page.index}", page.pairs),
            fills=[page.lease],
        )
        self.num_fetches += 1
        self._here.append(page)
        self.most_here = max(self.most_here, self._num_visiting)

    # ---- going --------------------------------------------------------------------------------

    @property
    def _num_visiting(self) -> int:
        return sum(not page.stays for page in self._here)

    def _make_space(self, wanted: Page) -> None:
        """Give up pages that are not in use, the farthest first, until one more may come."""
        while self._num_visiting >= self.slots and not wanted.stays:
            idle = [
                page
                for page in self._here
                if page is not self._at_work and not page.holders and not page.stays
            ]
            if not idle:
                return  # more are held than there are slots
            self.evict(max(idle, key=lambda page: abs(page.index - wanted.index)))

    def evict(self, page: Page) -> None:
        """Give up the device's copy of a page that is not in use; changes are at home then."""
        if page not in self._here:
            return
        if page.is_changed:
            self.send_home(page)
        self.transfers.wait_for_users(page.lease)
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
        self.transfers.submit(
            *(self.transfers.down, f"the weights of layer {page.index}"),
            [(there, home) for home, there in page.pairs],
            after=self.device.mark(),
            reads=[page.lease],
        )
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

    def write_newer(self, newer: Mapping[Page, Callable[[], None]]) -> None:
        """Let columns that the device's optimizer has stepped be written at a page's next visit.

        Args:
            newer: Function that writes each page's columns.
        """
        for page, write in newer.items():
            page.newer = write

    def stop_training(self) -> None:
        """Serve no engine any more: its threads have ended. All weights go home as they are."""
        self.transfers.leave_engine()
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
        self.transfers.close()
        self.device.close()


def backward_number() -> int:
    """Return the number of the backward that the calling thread is in; -1 outside of any.

    A layer that is computed again for its backward, as checkpointing has it, is inside.
    `torch.utils.checkpoint` asks in the same way.
    """
    return int(torch._C._current_graph_task_id())
