"""Study: tunes knobs offline, alone or with worker processes, and can be continued.

The same call continues a study that its storage has. Workers may also be started by hand, with
the same storage and name: they share one count of trials, and a worker that is killed loses the
trial it was at and nothing else.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from optuna.trial import FrozenTrial

from autotune.constraints import Feasibility
from autotune.interrupts import Interrupts, start_deaf
from autotune.offline.result import TuneResult, result_of
from autotune.offline.samplers import check_sampler
from autotune.offline.storage import fail_lost_trials, quiet_optuna
from autotune.offline.trial_loop import TrialLoop, TuningTask, open_study
from zenflow.errors import ConfigError

_POLL_SECONDS = 0.2
_PATIENCE_SECONDS = 20.0
"""Seconds that a worker has to end once it has been asked to."""


def tune(
    task: TuningTask,
    *,
    num_workers: int = 1,
    timeout: float | None = None,
    on_progress: Callable[[Sequence[FrozenTrial]], None] = lambda trials: None,
) -> TuneResult:
    """Return the best settings, after as many trials as are missing.

    Args:
        task: What is tuned, and how.
        num_workers: Processes that take trials; 1 is this one.
        timeout: Seconds after which no trial is begun; None is no limit.
        on_progress: Called with all trials, each time that some have changed.

    Raises:
        ConfigError: Nothing in the space meets the constraints, a name is unknown, the storage
            can't be opened or holds another study of this name, or no setting can be carried out.

    Examples:
        >>> from autotune.offline.backends import SimulatedBackend
        >>> from autotune.space import SearchSpace
        >>> from sim.hardware.catalog import find_machine
        >>> from sim.models.table import find_model
        >>> from sim.models.workload import Workload
        >>> workload = Workload.of_config(*find_model("gpt2"), batch_size=8)
        >>> task = TuningTask(
        ...     backend=SimulatedBackend(workload, find_machine("hgx-h100", 1)),
        ...     space=SearchSpace(
        ...         topk_ratios=(0.1,), update_intervals=(1, 4, 16), select_intervals=(100,)),
        ...     sampler="grid", num_trials=3)
        >>> result = tune(task)
        >>> len(result.candidates), result.best[0].knobs.update_interval
        (3, 4)
    """
    check_sampler(task.sampler, len(task.goals))
    if task.num_trials < 1 or num_workers < 1:
        raise ConfigError(
            f"a study needs at least one trial and one worker, got {task.num_trials} and "
            f"{num_workers}"
        )
    if num_workers > 1 and task.storage is None:
        raise ConfigError(
            f"{num_workers} workers need a storage that they share: give a path such as "
            "study.journal, or sqlite:///study.db"
        )
    Feasibility(task.constraints, task.backend.need, task.space).check()
    with quiet_optuna(), Interrupts(signal.SIGINT, signal.SIGTERM) as interrupts:
        study = open_study(task)
        num_before = len(study.get_trials(deepcopy=False))
        interrupted = False

        def report() -> None:
            on_progress(study.get_trials(deepcopy=False))
            interrupts.check()

        try:
            if num_workers == 1:
                loop = TrialLoop(study, task, interrupts, num_before=num_before)
                loop.run(timeout, report)
            else:
                _work_apart(task, num_workers, num_before, timeout, report)
        except KeyboardInterrupt:
            interrupted = True
        fail_lost_trials(study, study.get_trials(deepcopy=False))
        return result_of(study, task, interrupted=interrupted)


def _work_apart(
    task: TuningTask,
    num_workers: int,
    num_before: int,
    timeout: float | None,
    on_poll: Callable[[], None],
) -> None:
    """Let processes work until all have ended; ``on_poll`` is called a few times a second.

    They are spawned: a fork would share the storage's connections and torch's threads.

    Raises:
        ConfigError: A worker raised it.
    """
    context = multiprocessing.get_context("spawn")
    workers: list[tuple[BaseProcess, Connection]] = []
    try:
        for index in range(num_workers):
            receiver, sender = context.Pipe(duplex=False)
            worker = context.Process(
                target=_work, args=(task, index, num_before, timeout, sender), daemon=True
            )
            start_deaf(worker)  # Ctrl-C is ours, and we ask them to end
            sender.close()
            workers.append((worker, receiver))
        while any(worker.is_alive() for worker, _ in workers):
            time.sleep(_POLL_SECONDS)
            on_poll()
    finally:
        _end([worker for worker, _ in workers])
    for _, receiver in workers:
        message = _received(receiver)
        if message is not None:
            raise ConfigError(message)


def _received(receiver: Connection) -> str | None:
    try:
        return str(receiver.recv()) if receiver.poll() else None
    except EOFError:  # it had nothing to say
        return None


def _end(workers: Sequence[BaseProcess]) -> None:
    """Ask workers to end, wait for them, and end them where that doesn't help."""
    for worker in workers:
        if worker.is_alive():
            worker.terminate()
    deadline = time.monotonic() + _PATIENCE_SECONDS
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))
        if worker.is_alive():
            worker.kill()
            worker.join()


def _work(
    task: TuningTask, index: int, num_before: int, timeout: float | None, sender: Connection
) -> None:
    """Take trials in a process of its own; the one that started it says when to stop early."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with quiet_optuna(), Interrupts(signal.SIGTERM) as interrupts:
        try:
            loop = TrialLoop(
                open_study(task), task, interrupts, index=index, num_before=num_before
            )
            loop.run(timeout, lambda: None)
        except ConfigError as error:
            sender.send(str(error))
        except KeyboardInterrupt:
            pass  # as asked: its trial has been failed


def _end_with_parent() -> None:
    """Interrupt this process once nobody waits for it any more."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
