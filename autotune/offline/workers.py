"""Workers: processes that share a study, of which any may be killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from autotune.interrupts import Interrupts, start_deaf
from autotune.offline.storage import quiet_optuna
from autotune.offline.trial_loop import TrialLoop, TuningTask, open_study
from zenflow.errors import ConfigError

_POLL_SECONDS = 0.2
_PATIENCE_SECONDS = 20.0
"""Seconds that a worker has to end once it has been asked to."""


def work_apart(
    task: TuningTask,
    num_workers: int,
    num_before: int,
    timeout: float | None,
    on_poll: Callable[[], None],
) -> None:
    """Let processes work until all have ended.

    They are spawned: a fork would share the storage's connections and torch's threads.

    Args:
        task: What is tuned.
        num_workers: How many processes.
        num_before: Trials of the study before.
        timeout: Seconds after which no trial is begun; None is no limit.
        on_poll: Called a few times a second.

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
