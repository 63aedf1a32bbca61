"""Pool: processes that work through points, and go on when one of them is killed.

`ProcessPoolExecutor` does not say which task killed a process. The tasks that were under way are
therefore tried again one at a time. A task that kills again is split, down to the one point.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker

from autotune.interrupts import deaf_children
from experiments.sweeps.columns import FAILED, Batch
from experiments.sweeps.grid import Sweep
from experiments.sweeps.points import batches_of
from zenflow.errors import ZenFlowError

_MOST_LOST = 50
"""Pools, after which it is no accident."""
_LARGEST_TASK = 8192
"""Points; formulas answer as many at once."""
_TASKS_PER_WORKER = 8
"""Least tasks of each worker, so that all are busy to the end."""
_PARTS = 16
"""Tasks that a task becomes which has killed its process."""
_ANSWERING = 1.0
"""Seconds of work after which a process hands over its results: a killed one loses no more."""
_PATIENCE = 0.2
"""Seconds between two looks at whether to stop."""
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

LOST = "its worker process was killed twice"

Task = list[int]
"""Points that one process answers."""


def tasks_of(points: Sequence[int], workers: int) -> list[Task]:
    """Return points in tasks that are short enough to share out, and neighbours together."""
    size = min(_LARGEST_TASK, len(points) // (workers * _TASKS_PER_WORKER))
    return _pieces([*map(int, points)], max(1, size))


def _pieces(task: Task, size: int) -> list[Task]:
    return [task[at : at + size] for at in range(0, len(task), size)]


def local_batches(
    sweep: Sweep, points: Sequence[int], workers: int, must_stop: Callable[[], bool]
) -> Iterator[Batch]:
    """Yield every point's results from processes of this machine, until it is asked to stop.

    Args:
        sweep: What is predicted.
        points: Indices.
        workers: Processes; one is this process itself.
        must_stop: Asked between batches.

    Raises:
        ZenFlowError: Processes keep dying.
    """
    tasks = tasks_of(points, workers)
    if workers > 1:
        with _one_thread_each():
            yield from _Pools(sweep, tasks, must_stop).batches(min(workers, len(tasks)))
        return
    for task in tasks:
        for batch in batches_of(sweep, task):
            yield batch
            if must_stop():
                return


class _Pools:
    """The tasks of a sweep, and the pools of processes that answer them."""

    def __init__(self, sweep: Sweep, tasks: list[Task], must_stop: Callable[[], bool]) -> None:
        self._sweep, self._must_stop = sweep, must_stop
        self._tasks = deque(tasks)
        self._lost = 0

    def batches(self, workers: int) -> Iterator[Batch]:
        while self._tasks and not self._must_stop():
            suspects = deque((yield from self._answers(self._tasks, workers)))
            while suspects and not self._must_stop():
                for task in (yield from self._answers(suspects, 1)):
                    if len(task) == 1:
                        yield Batch.of(task, {"status": FAILED, "reason": LOST})
                    else:
                        suspects.extendleft(reversed(_pieces(task, -(-len(task) // _PARTS))))

    def _answers(self, tasks: deque[Task], workers: int) -> Generator[Batch, None, list[Task]]:
        """Yield results from one pool; return the tasks that were under way as a process died.

        Raises:
            ZenFlowError: Processes keep dying.
        """
        under_way: dict[Future[Batch], Task] = {}
        with _pool(self._sweep, workers) as pool, suppress(BrokenProcessPool):
            while True:
                # No more tasks than processes: one that waits would be a suspect too.
                while tasks and len(under_way) < workers and not self._must_stop():
                    with deaf_children():  # Ctrl-C reaches all: the parent decides
                        future = pool.submit(_answer, tasks[0])
                    under_way[future] = tasks.popleft()
                if not under_way:
                    return []
                for future in wait(under_way, _PATIENCE, FIRST_COMPLETED).done:
                    batch = future.result()
                    answered = set(batch.points.tolist())
                    left = [point for point in under_way.pop(future) if point not in answered]
                    if left:
                        self._tasks.appendleft(left)
                    yield batch
        self._lost += 1
        if self._lost > _MOST_LOST:
            raise ZenFlowError(
                f"worker processes have died {self._lost} times: is memory short? The same "
                "command goes on, with fewer --workers too"
            )
        return list(under_way.values())


@contextmanager
def _pool(sweep: Sweep, workers: int) -> Iterator[ProcessPoolExecutor]:
    """Yield processes that can answer points of a sweep; each starts with its first task."""
    resource_tracker.ensure_running()  # it would lift the mask of `deaf_children`
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _begin, (sweep,)) as pool:
        try:
            yield pool
        finally:
            pool.shutdown(cancel_futures=True)


_given: list[Sweep] = []
"""A worker process's sweep."""


def _begin(sweep: Sweep) -> None:
    """Keep a process's sweep, and end with the parent, which may be killed."""
    _given.append(sweep)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _answer(points: Task) -> Batch:
    """Return the results of points, as many as are found in some time."""
    began = time.monotonic()
    batches = []
    for batch in batches_of(_given[0], points):
        batches.append(batch)
        if time.monotonic() - began > _ANSWERING:
            break
    return Batch.joined(batches)


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
