"""Pool: processes that work through points, and go on when one of them is killed.

Results come back within moments, so a killed process costs what it was at. Points it had not
answered are given to others in smaller tasks; a point that kills its process again and again is
reported as failed.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

from autotune.interrupts import start_deaf
from experiments.sweeps.columns import FAILED, Batch
from experiments.sweeps.grid import Sweep
from experiments.sweeps.points import batches_of
from zenflow.errors import ZenFlowError

MOST_TRIES = 3
"""Most tries of a point whose process is killed."""
_MOST_LOST = 50
"""Processes, after which it is no accident."""
_LARGEST_TASK = 8192
"""Points; formulas answer as many at once."""
_PARTS = 64
"""Tasks that the points of a killed process are shared out to."""
_TASKS_PER_WORKER = 8
"""Least tasks of each worker, so that all are busy to the end."""
_PATIENCE = 0.2
"""Seconds between two looks at whether to stop."""
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

LOST = "its worker process was killed, again and again"


@dataclass(slots=True)
class Task:
    """Points that one process answers."""

    points: list[int]
    tries: int = 0
    """Number of tries so far that ended with the process."""


def tasks_of(points: Sequence[int], workers: int) -> list[list[int]]:
    """Return points in tasks that are short enough to share out, and neighbours together."""
    size = max(1, min(_LARGEST_TASK, len(points) // (workers * _TASKS_PER_WORKER)))
    return [[*map(int, points[at : at + size])] for at in range(0, len(points), size)]


def local_batches(
    sweep: Sweep, points: Sequence[int], workers: int, must_stop: Callable[[], bool]
) -> Iterator[Batch]:
    """Yield every point's results from processes of this machine, until it is asked to stop.

    Args:
        sweep: What is predicted.
        points: Indices.
        workers: Processes; one is this process itself.
        must_stop: Asked before each batch.

    Raises:
        ZenFlowError: Processes keep dying.
    """
    tasks = tasks_of(points, workers)
    if workers == 1:
        for task in tasks:
            for batch in batches_of(sweep, task):
                yield batch
                if must_stop():
                    return
        return
    with _one_thread_each():
        crew = _Crew(sweep, min(workers, len(tasks)))
        try:
            yield from crew.batches(deque(Task(task) for task in tasks), must_stop)
        finally:
            crew.dismiss()


@dataclass(slots=True)
class _Worker:
    """One process and what it is at."""

    process: SpawnProcess
    pipe: Connection
    task: Task | None = None
    left: set[int] = field(default_factory=set)
    """Points of the task without a result."""

    def begin(self, task: Task) -> None:
        self.task, self.left = task, set(task.points)
        self.pipe.send(task.points)


class _Crew:
    """Processes that stay while there is work."""

    def __init__(self, sweep: Sweep, size: int) -> None:
        self._sweep = sweep
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[_Worker] = []
        self._lost = 0
        for _ in range(size):
            self._hire()

    def _hire(self) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_work, args=(self._sweep, theirs), daemon=True)
        start_deaf(process)  # Ctrl-C reaches all: the parent decides
        theirs.close()  # so that the pipe ends with the process
        self._workers.append(_Worker(process, ours))

    def batches(self, tasks: deque[Task], must_stop: Callable[[], bool]) -> Iterator[Batch]:
        while True:
            for worker in self._workers:
                if worker.task is None and tasks:
                    with suppress(OSError):  # where it is dead its pipe says so below
                        worker.begin(tasks.popleft())
            busy = [worker for worker in self._workers if worker.task is not None]
            if not busy:
                return
            ready = wait([worker.pipe for worker in busy], _PATIENCE)
            for worker in busy:
                if worker.pipe in ready:
                    yield from self._received(worker, tasks)
            if must_stop():
                return

    def _received(self, worker: _Worker, tasks: deque[Task]) -> Iterator[Batch]:
        """Yield the messages in a pipe; where the process is gone another takes its place."""
        try:
            while worker.task is not None and worker.pipe.poll():
                batch = worker.pipe.recv()
                worker.left.difference_update(batch.points.tolist())
                if not worker.left:
                    worker.task = None
                yield batch
        except (EOFError, OSError):
            yield from self._replaced(worker, tasks)

    def _replaced(self, worker: _Worker, tasks: deque[Task]) -> Iterator[Batch]:
        assert worker.task is not None
        self._lost += 1
        worker.process.join()
        if self._lost > _MOST_LOST:
            raise ZenFlowError(
                f"{self._lost} worker processes have died, the last with exit code "
                f"{worker.process.exitcode}: is memory short? The same command goes on, "
                "with fewer --workers too"
            )
        tries = worker.task.tries + 1
        self._workers.remove(worker)
        worker.pipe.close()
        if len(worker.task.points) == 1 and tries >= MOST_TRIES:
            yield Batch.of_rows({worker.left.pop(): {"status": FAILED, "reason": LOST}})
        else:
            left = [point for point in worker.task.points if point in worker.left]
            size = -(-len(left) // _PARTS)
            parts = [left[at : at + size] for at in range(0, len(left), size)]
            tasks.extendleft(Task(part, tries) for part in reversed(parts))
        if tasks:
            self._hire()

    def dismiss(self) -> None:
        """End all processes, whatever they are at."""
        for worker in self._workers:
            worker.process.terminate()
        for worker in self._workers:
            worker.process.join()
            worker.pipe.close()


def _work(sweep: Sweep, pipe: Connection) -> None:
    """Answer points until the other side is gone."""
    while True:
        try:
            points = pipe.recv()
        except EOFError:
            return
        for batch in batches_of(sweep, points):
            pipe.send(batch)


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Let processes that start meanwhile compute on one thread: there are as many as cores."""
    before = {name: os.environ.get(name) for name in _THREADS}
    os.environ.update(dict.fromkeys(_THREADS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
