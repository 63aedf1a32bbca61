"""The host worker: threads that accumulate gradients and run CPU AdamW behind the device's back.

Tasks are taken earliest deadline first, and only when their inputs are there: an update that is
due in three steps never holds up the gradients of the last step. The numerical work is in the
tasks' callables, which give up the interpreter lock.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from zenflow.lanes.completion import Completion
from zenflow.lanes.threads import join, start
from zenflow.trace.recorder import Recorder


class Loan(Protocol):
    """Memory that a part needs, and that has to be filled first."""

    @property
    def there(self) -> Completion:
        """Completion of the filling."""

    def ask(self) -> None:
        """Let the memory be filled: all else that the task needs is there."""


@dataclass(slots=True, order=True)
class HostTask:
    """One block's accumulation or update, as parts that may run on several threads at once."""

    deadline: int
    """Step by whose end the task must be done."""
    step: int
    """Number of the step that the task belongs to."""
    rank: int
    """Place among the step's tasks of the same deadline."""
    order: int
    """Number of tasks that were submitted before this one."""
    name: str = field(compare=False)
    """Name of the task's spans in a timeline."""
    parts: list[Callable[[], None]] = field(compare=False)
    """Parts that no thread has taken yet; those that need a loan come when it is there."""
    loans: list[tuple[Loan, Callable[[], None]]] = field(compare=False)
    """Loans that the task needs, each with its part; empty for a task on memory alone."""
    completion: Completion = field(compare=False)
    """Completion that marks the end of the task."""
    num_unfinished: int = field(compare=False)
    """Number of parts that have not ended."""
    num_awaited: int = field(compare=False)
    """Number of completions that the task still waits for before it starts."""


class HostWorker:
    """A few threads with one queue of tasks.

    Owned by the optimizer; `close` ends the threads. A part that raises fails its task's
    completion with that error; tasks that need it fail with the same cause.
    """

    def __init__(self, recorder: Recorder, enter_thread: Callable[[], None]) -> None:
        """Make a worker without threads; each of them calls `enter_thread` first."""
        self._enter_thread = enter_thread
        self._recorder = recorder
        self._condition = threading.Condition()
        self._ready: list[HostTask] = []
        self._waiting: dict[int, HostTask] = {}
        self._reading: dict[int, HostTask] = {}
        self._order = itertools.count()
        self._closed = False
        self._threads: list[threading.Thread] = []

    def start(self, num_threads: int) -> None:
        """Start the threads."""
        for index in range(num_threads):
            name = f"zenflow-host-{index}"
            thread = threading.Thread(target=self._loop, name=name, daemon=True)
            start(thread)
            self._threads.append(thread)

    def submit(
        self,
        name: str,
        parts: list[Callable[[], None]],
        *,
        completion: Completion,
        deadline: int,
        step: int,
        after: Sequence[Completion],
        rank: int = 0,
        loans: Sequence[Loan] = (),
    ) -> None:
        """Queue a task that starts once all of `after` is done, and marks its end.

        Of a step's tasks with the same deadline the lowest `rank` comes first. Where there are
        loans, each part waits for one of its own, which is asked for when the task could start.
        """
        awaited = [before for before in after if not before.has_succeeded]
        task = HostTask(
            deadline=deadline,
            rank=rank,
            order=next(self._order),
            name=name,
            step=step,
            parts=[] if loans else parts,
            loans=list(zip(loans, parts, strict=True)) if loans else [],
            completion=completion,
            num_unfinished=len(parts),
            num_awaited=len(awaited) + 1,
        )
        with self._condition:
            self._waiting[task.order] = task
        for before in awaited:
            before.when_done(partial(self._arrived, task, before))
        self._arrived(task, None)

    def _arrived(self, task: HostTask, completion: Completion | None) -> None:
        """Note an awaited completion: the last one starts the task, a failed one ends it."""
        error = completion.error if completion is not None else None
        with self._condition:
            task.num_awaited -= 1
            if task.order not in self._waiting or (error is None and task.num_awaited):
                return  # ended already, or there is more to wait for
            del self._waiting[task.order]
            is_ready = error is None and not self._closed
            if is_ready and task.loans:
                self._reading[task.order] = task
            elif is_ready:
                heapq.heappush(self._ready, task)
                self._condition.notify(len(task.parts))
        if not is_ready:
            task.completion.fail(error or RuntimeError("the optimizer was closed"))
        for loan, part in task.loans if is_ready else ():
            loan.there.when_done(partial(self._fetched, task, loan.there, part))
            loan.ask()

    def _fetched(self, task: HostTask, there: Completion, part: Callable[[], None]) -> None:
        """Let a part start whose loan is there."""
        if there.error is not None:
            task.completion.fail(there.error)
            return
        with self._condition:
            task.parts.append(part)
            task.num_awaited += 1
            if task.num_awaited == len(task.loans):
                self._reading.pop(task.order, None)
            heapq.heappush(self._ready, task)
            self._condition.notify()

    def _take(self) -> tuple[HostTask, Callable[[], None]] | None:
        """Return the next part to run, None when closed; call with the condition held."""
        while not self._closed:
            while self._ready:
                task = self._ready[0]
                if task.parts:
                    return task, task.parts.pop()
                heapq.heappop(self._ready)  # all its parts are taken
            self._condition.wait()
        return None

    def _loop(self) -> None:
        self._enter_thread()
        while True:
            with self._condition:
                taken = self._take()
            if taken is None:
                return
            task, part = taken
            started = time.perf_counter()
            try:
                part()
            except BaseException as error:  # noqa: BLE001 - reaches step() by the completion
                with self._condition:
                    if not task.loans:  # parts that have a loan give it back
                        task.parts.clear()
                task.completion.fail(error)
                continue
            self._recorder.add("host", task.name, started, time.perf_counter(), task.step)
            with self._condition:
                task.num_unfinished -= 1
                is_last = task.num_unfinished == 0
            if is_last:
                task.completion.mark_done()
            del taken, task, part  # no references to buffers while idle

    def close(self) -> None:
        """End the threads; tasks that have not started are dropped, and waits for them fail."""
        with self._condition:
            self._closed = True
            dropped = [*self._waiting.values(), *self._reading.values()]
            dropped += [task for task in self._ready if task.parts]
            self._waiting.clear()
            self._reading.clear()
            self._ready.clear()
            self._condition.notify_all()
        for task in dropped:
            task.completion.fail(RuntimeError("the optimizer was closed"))
        for thread in self._threads:
            join(thread)
