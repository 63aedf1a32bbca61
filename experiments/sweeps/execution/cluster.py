"""Cluster: the same points on Dask's workers, on this machine or on others.

Dask gives a killed worker's tasks to another, and after a few deaths calls the task itself the
killer: its points are then reported as failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from experiments.sweeps.columns import FAILED, Batch
from experiments.sweeps.execution.pool import tasks_of
from experiments.sweeps.grid import Sweep
from experiments.sweeps.points import batches_of
from zenflow.errors import ConfigError, ZenFlowError

_AHEAD = 4
"""Tasks under way for each of Dask's threads."""
_PATIENCE = 0.5
"""Seconds between two looks at whether to stop."""
_CONNECTING = 20
"""Largest wait for a connection, seconds."""


def check_cluster() -> None:
    """Refuse to begin without Dask.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        import distributed  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "--engine dask needs Dask: pip install 'zenflow-offload[cluster]', or leave out "
            "--engine"
        ) from error


def cluster_batches(
    sweep: Sweep,
    points: Sequence[int],
    *,
    workers: int,
    scheduler: str | None,
    must_stop: Callable[[], bool],
) -> Iterator[Batch]:
    """Yield every point's results from a Dask cluster, until it is asked to stop.

    Args:
        sweep: What is predicted.
        points: Indices.
        workers: Processes of a cluster on this machine, where no scheduler is given.
        scheduler: Address of a cluster's, whose workers have this package too.
        must_stop: Asked between tasks.

    Raises:
        ConfigError: The scheduler can't be reached.
        ZenFlowError: The cluster has no workers, or lost its scheduler.
    """
    with _client(workers, scheduler) as client:
        threads = sum(client.nthreads().values())
        if not threads:
            raise ZenFlowError(
                f"the cluster at {scheduler} has no workers: start some with "
                f"`dask worker {scheduler}`"
            )
        yield from _gathered(client, sweep, tasks_of(points, threads), threads, must_stop)


@contextmanager
def _client(workers: int, scheduler: str | None) -> Iterator[Any]:
    """Yield a client of the scheduler, or else of a cluster that is made for it."""
    import distributed

    dask: Any = distributed  # which has no annotations
    if scheduler is None:
        with (
            dask.LocalCluster(
                n_workers=workers, threads_per_worker=1, dashboard_address=None, silence_logs=40
            ) as cluster,
            dask.Client(cluster) as client,
        ):
            yield client
        return
    try:
        client = dask.Client(scheduler, timeout=_CONNECTING)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--scheduler {scheduler} can't be reached ({error}): give its address, as in "
            "tcp://10.0.0.1:8786"
        ) from error
    with client:
        yield client


def _gathered(
    client: Any,
    sweep: Sweep,
    tasks: Sequence[Sequence[int]],
    threads: int,
    must_stop: Callable[[], bool],
) -> Iterator[Batch]:
    import distributed

    dask: Any = distributed  # which has no annotations
    [shared] = client.scatter([sweep], broadcast=True)
    left = list(reversed(tasks))
    under_way: dict[Any, Sequence[int]] = {}
    while (left or under_way) and not must_stop():
        while left and len(under_way) < _AHEAD * threads:
            task = left.pop()
            under_way[client.submit(_answer, shared, task, pure=False)] = task
        try:
            done = dask.wait(
                list(under_way), timeout=_PATIENCE, return_when="FIRST_COMPLETED"
            ).done
        except TimeoutError:
            continue
        for future in done:
            points = under_way.pop(future)
            try:
                yield from future.result()
            except dask.KilledWorker as error:
                failed = {"status": FAILED, "reason": f"its workers were killed: {error}"}
                yield Batch.of(points, failed)
    client.cancel(list(under_way))


def _answer(sweep: Sweep, points: Sequence[int]) -> list[Batch]:
    """Return the results of some points; runs on a worker."""
    return list(batches_of(sweep, points))
