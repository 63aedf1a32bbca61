"""The host worker: threads that accumulate gradients and run CPU AdamW behind the device's back.

Tasks are taken earliest deadline first, and only when what they need is there: an update that is
due in three steps never holds up the gradients of the last one. No torch; the numerical work is
in the callables, which release the GIL.
"""

from __future__ import annotations

import bisect
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from zenflow.completion import Completion
from zenflow.recorder import Recorder


@dataclass(slots=True, order=True)
class HostTask:
    """One block's accumulation or update, as parts that may run on several threads at once."""

    deadline: int
    """Step by whose end the task must be finished."""
    order: int
    """Rank among tasks of the same deadline: the order of submission."""
    name: str = field(compare=False)
    step: int = field(compare=False)
    parts: list[Callable[[], None]] = field(compare=False)
    after: Sequence[Completion] = field(compare=False)
    done: Completion = field(compare=False)
    unfinished: int = field(compare=False)
    num_bytes: int = field(compare=False, default=0)


class HostWorker:
    """A few threads with one queue of tasks.

    Owned by the optimizer; `close` ends the threads. A part that raises fails its task's
    completion with that error; tasks that need it fail with the same cause.
    """

    def __init__(self, num_threads: int, recorder: Recorder) -> None:
        """Start `num_threads` threads."""
        self.num_threads = num_threads
        self._recorder = recorder
        self._condition = threading.Condition()
        self._tasks: list[HostTask] = []
        self._order = itertools.count()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._loop, name=f"zenflow-host-{index}", daemon=True)
            for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self,
        name: str,
        parts: list[Callable[[], None]],
        *,
        deadline: int,
        step: int,
        after: Sequence[Completion],
        num_bytes: int = 0,
    ) -> Completion:
        """Queue a task and return its completion; it starts once all of `after` has finished."""
        done = Completion(f"the host's {name} of step {step}")
        task = HostTask(
            deadline=deadline,
            order=next(self._order),
            name=name,
            step=step,
            parts=parts,
            after=after,
            done=done,
            unfinished=len(parts),
            num_bytes=num_bytes,
        )
        with self._condition:
            bisect.insort(self._tasks, task)
            self._condition.notify_all()
        for completion in after:
            if not completion.is_set():
                completion.then(self._wake)
        return done

    def _wake(self) -> None:
        with self._condition:
            self._condition.notify_all()

    def _take(self) -> tuple[HostTask, Callable[[], None]] | None:
        """Return the next part to run, None when closed; call with the condition held."""
        while not self._closed:
            for index, task in enumerate(self._tasks):
                failed = next((c.error for c in task.after if c.error is not None), None)
                if failed is not None:
                    del self._tasks[index]
                    task.done.fail(failed)
                    break
                if all(completion.is_finished() for completion in task.after):
                    part = task.parts.pop()
                    if not task.parts:
                        del self._tasks[index]
                    return task, part
            else:
                # A copy that is launched on a GPU but not finished sends no signal: look again.
                launched = any(
                    c.is_set() and not c.is_finished() for task in self._tasks for c in task.after
                )
                self._condition.wait(timeout=2e-4 if launched else None)
        return None

    def _loop(self) -> None:
        while True:
            with self._condition:
                taken = self._take()
            if taken is None:
                return
            task, part = taken
            started = time.perf_counter()
            try:
                part()
            except BaseException as error:  # noqa: BLE001 - reaches step() through `done`
                with self._condition:
                    if task in self._tasks:
                        self._tasks.remove(task)
                task.done.fail(error)
                continue
            self._recorder.add(
                "host", task.name, started, time.perf_counter(), task.step, task.num_bytes
            )
            with self._condition:
                task.unfinished -= 1
                is_last = task.unfinished == 0
            if is_last:
                task.done.set()
            del taken, task, part  # no references to buffers while idle

    def close(self) -> None:
        """End the threads; tasks not yet started are dropped, and fail for who waits for them."""
        with self._condition:
            self._closed = True
            dropped, self._tasks = self._tasks, []
            self._condition.notify_all()
        for task in dropped:
            task.done.fail(RuntimeError("the optimizer was closed"))
        for thread in self._threads:
            thread.join(timeout=5.0)
