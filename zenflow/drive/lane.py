"""Drive lane: threads that read extents ahead of their use, and write them behind it.

A few buffers are all the memory that extents ever take. An extent is asked for once its user could
begin, and the most urgent extents are read first. So whoever has got one can go on, and gives it
back: no order of requests makes users wait for each other.
"""

from __future__ import annotations

import heapq
import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from torch import Tensor, uint8

from zenflow.drive.extents import Extent, RowState
from zenflow.drive.folder import StateFolder
from zenflow.drive.loan import Loan, StarvedClock, Urgency
from zenflow.drive.manifest import Generation
from zenflow.errors import DeadlineError, WorkerError
from zenflow.host import memory as host_memory
from zenflow.lanes.threads import join, start
from zenflow.rule.sizes import NUM_BUFFERS
from zenflow.trace.recorder import Recorder

LANE = "drive"
"""Name of the lane in a timeline, and of its stalls."""
READERS, WRITERS = 2, 2
"""Number of threads that read, and that write. A drive is fast with several requests at once."""

_AT_ONCE: Urgency = (-1,)


class DriveLane:
    """Threads between a folder's extents and the host's work on them. `close` ends them.

    Attributes:
        folder: The folder.
        extents: Its extents.
        num_bytes: Bytes of the buffers.
        recorder: Keeps spans of reads and writes; None until an engine has one.
    """

    def __init__(
        self, folder: StateFolder, extents: Sequence[Extent], *, wait_timeout: float
    ) -> None:
        """Allocate the buffers, and make threads that `start` starts.

        Args:
            folder: Folder of the extents, which the lane closes.
            extents: All extents.
            wait_timeout: Seconds after which a wait is an error.
        """
        self.folder = folder
        self.extents = extents
        self._wait_timeout = wait_timeout
        self.recorder: Recorder | None = None
        largest = max((extent.num_bytes for extent in extents), default=0)
        count = self._num_buffers = min(NUM_BUFFERS, len(extents))
        # Shared pages that no fork has: a copy on write would part a buffer from a transfer.
        slab = host_memory.zeroed(count * largest, uint8, forks=False)
        self.num_bytes = slab.nbytes
        self._free: list[Tensor] = list(slab.split(largest)) if count else []
        self._condition = threading.Condition()
        self._order = itertools.count()
        self._wanted: list[tuple[Urgency, int, Loan]] = []
        self._behind: dict[int, list[Loan]] = {}
        """Loans that wait for the end of their extent's write, by each extent that has one."""
        self._dirty: deque[Loan] = deque()
        self._num_asked = self._num_lent = 0
        self._clock = StarvedClock()
        self._error: OSError | None = None
        self._closed = False
        self._taken = (0, 0)
        self._threads = [
            threading.Thread(target=self._loop, args=(work,), name=f"zenflow-{name}", daemon=True)
            for work, name, n in (
                (self._read_next, "drive-read", READERS),
                (self._write_next, "drive-write", WRITERS),
            )
            for _ in range(n)
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads if self.extents else ():
            start(thread)

    # ---- users ------------------------------------------------------------------------------

    def loan(
        self, extent: Extent, urgency: Urgency, step: int, *, weights_only: bool = False
    ) -> Loan:
        """Return a request for an extent, which `Loan.ask` makes."""
        return Loan(self, extent, urgency, step, weights_only=weights_only)

    def passing(
        self, extents: Sequence[Extent], *, weights_only: bool = False, changes: bool = False
    ) -> Iterator[tuple[Extent, RowState]]:
        """Yield extents with their states, in order and read ahead; each until the next one.

        Args:
            extents: The extents, whose users before have ended.
            weights_only: Whether only the weights are read, and the rest may be anything.
            changes: Whether the states are changed.

        Raises:
            WorkerError: The drive has failed.
            CheckpointError: The extents are not to be changed: see `StateFolder.claim`.
        """
        if changes:
            self.folder.claim()
        rest = iter(extents)
        ahead: deque[Loan] = deque()

        def ask(count: int) -> None:
            for extent in itertools.islice(rest, count):
                ahead.append(self.loan(extent, _AT_ONCE, 0, weights_only=weights_only))
                ahead[-1].ask()

        ask(self._num_buffers)
        try:
            while ahead:
                loan = ahead[0]
                loan.there.wait_done(self._wait_timeout)
                ahead.popleft()
                with loan.used(changes=changes) as state:
                    yield loan.extent, state
                ask(1)
        finally:
            for loan in ahead:
                loan.there.when_done(partial(loan.give_back, changed=False))

    def flush(self) -> None:
        """Wait until all changed extents are written.

        Raises:
            WorkerError: The drive has failed.
            DeadlineError: Writing took longer than the wait's limit.
        """
        with self._condition:
            written = self._condition.wait_for(
                lambda: self._error is not None or not self._behind, self._wait_timeout
            )
        if self._error is not None:
            raise WorkerError(
                f"{self._error}. The optimizer can't go on: resume from the last checkpoint once "
                "the cause is mended"
            ) from self._error
        if not written:
            raise DeadlineError(
                f"waited {self._wait_timeout:g} s for writes to {self.folder.path}: the drive is "
                "far slower than the states need. Raise wait_timeout if that is expected"
            )

    def commit(self, step: int) -> Generation:
        """Let the extents as they are be a checkpoint of the folder; no work changes them."""
        self.folder.claim()
        self.flush()
        return self.folder.commit(step)

    def check(self, generation: Generation) -> None:
        """Read all of a checkpoint's extents, and compare them with their checksums.

        Raises:
            CheckpointError: An extent is damaged.
        """
        self.flush()
        buffers: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        for buffer in self._free:
            buffers.put(buffer)

        def check(extent: Extent) -> None:
            memory = buffers.get()
            try:
                self.folder.check(generation, extent, memory.numpy())
            finally:
                buffers.put(memory)

        with ThreadPoolExecutor(READERS, "zenflow-drive-check") as readers:
            list(readers.map(check, self.extents))

    def open(self, generation: Generation) -> None:
        """Go on from a checkpoint of the folder; no work changes extents."""
        self.flush()
        self.folder.open(generation)

    def forget(self, extents: Sequence[Extent]) -> None:
        """Let extents be zeros; no work changes them."""
        self.flush()
        self.folder.forget(extents)

    def take_bytes(self) -> tuple[int, int]:
        """Return the bytes that were read and written since the last call."""
        now = self.folder.read_bytes, self.folder.written_bytes
        read, written = now[0] - self._taken[0], now[1] - self._taken[1]
        self._taken = now
        return read, written

    def starved_seconds(self) -> float:
        """Return the seconds so far in which users waited for extents, and none was in use."""
        with self._condition:
            return self._clock.seconds(time.perf_counter())

    # ---- threads ----------------------------------------------------------------------------

    def _ask(self, loan: Loan) -> None:
        with self._condition:
            self._num_asked += 1
            self._note()
            self._want(loan)

    def _want(self, loan: Loan) -> None:
        """Queue a request, behind the write of its extent if one is under way."""
        waiting = self._behind.get(loan.extent.index)
        if waiting is not None:
            waiting.append(loan)
            return
        heapq.heappush(self._wanted, (loan.urgency, next(self._order), loan))
        self._condition.notify_all()

    def _take_back(self, loan: Loan, *, changed: bool) -> None:
        if loan.memory is None:  # reading it has failed
            return
        with self._condition:
            self._num_lent -= 1
            self._note()
            if changed:
                self._behind[loan.extent.index] = []
                self._dirty.append(loan)
                self._condition.notify_all()
            else:
                self._release(loan)

    def _release(self, loan: Loan) -> None:
        assert loan.memory is not None
        self._free.append(loan.memory)
        loan.memory = None
        self._condition.notify_all()

    def _note(self) -> None:
        """Let the clock of starved users run or stand, as the counts are now."""
        self._clock.run(time.perf_counter(), self._num_asked > 0 and not self._num_lent)

    def _loop(self, work: Callable[[], bool]) -> None:
        while work():
            pass

    def _read_next(self) -> bool:
        with self._condition:
            self._condition.wait_for(lambda: self._closed or (self._wanted and self._free))
            if self._closed:
                return False
            _, _, loan = heapq.heappop(self._wanted)
            loan.memory = self._free.pop()
        error: Exception | None = self._error
        if error is None:
            try:
                self._fill(loan)
            except Exception as found:  # noqa: BLE001 - reaches the user by the completion
                error = self._failed("read", loan, found)
        with self._condition:
            self._num_asked -= 1
            if error is None:
                self._num_lent += 1
            else:
                self._release(loan)
            self._note()
        if error is None:
            loan.there.mark_done()
        else:
            loan.there.fail(error)
        return True

    def _fill(self, loan: Loan) -> None:
        """Read a loan's extent into its memory."""
        assert loan.memory is not None
        started = time.perf_counter()
        memory = loan.memory.numpy()
        num_bytes = self.folder.read(loan.extent, memory, weights_only=loan.weights_only)
        self._record("read", started, loan, num_bytes)

    def _write_next(self) -> bool:
        with self._condition:
            self._condition.wait_for(lambda: self._closed or self._dirty)
            if self._closed:
                return False
            loan = self._dirty.popleft()
        try:
            if self._error is None:
                self._store(loan)
        except Exception as found:  # noqa: BLE001 - ends the run at its next request
            self._error = self._failed("written", loan, found)
        with self._condition:
            self._release(loan)
            for waiting in self._behind.pop(loan.extent.index):
                self._want(waiting)
        return True

    def _store(self, loan: Loan) -> None:
        """Write a loan's memory to its extent."""
        assert loan.memory is not None
        started = time.perf_counter()
        num_bytes = self.folder.write(loan.extent, loan.memory.numpy())
        self._record("write", started, loan, num_bytes)

    def _failed(self, what: str, loan: Loan, error: Exception) -> OSError:
        """Return an error that names the file and the checkpoint that remains."""
        number = error.errno if isinstance(error, OSError) else None
        text = (
            f"extent {loan.extent.index} of {self.folder.states} can't be {what} ({error}); "
            f"{self.folder.last_checkpoint()}"
        )
        made = OSError(text) if number is None else OSError(number, text)
        made.__cause__ = error
        return made

    def _record(self, name: str, started: float, loan: Loan, num_bytes: int) -> None:
        if self.recorder is not None and num_bytes:
            end = time.perf_counter()
            self.recorder.add(LANE, name, started, end, loan.step, num_bytes)

    def close(self) -> None:
        """End the threads and close the folder; extents that wait for a write are dropped."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        for thread in self._threads:
            join(thread)
        if not any(thread.is_alive() for thread in self._threads):
            self.folder.close()  # else a drive that hangs would meet another file of this number
