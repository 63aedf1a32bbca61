"""Storage: the place of a study's trials, so that workers share it and it survives."""

from __future__ import annotations

import json
import os
import socket
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import optuna
import psutil
from optuna.storages import BaseStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from zenflow.errors import ConfigError

JOURNAL_SUFFIXES = (".log", ".journal")

_HEARTBEAT_SECONDS, _GRACE_SECONDS = 10, 40
"""Seconds between signs of a trial; seconds without one after which it counts as lost."""
_UNSIGNED = timedelta(seconds=30)
"""Time within which a trial names its worker, unless that was killed before it could."""
_ATTEMPTS, _PAUSE = 5, 0.2
"""Workers that start together may make a database's tables at the same time: one is too late."""


def open_storage(where: str | None) -> BaseStorage | None:
    """Return the storage: a journal file, a database by URL, or None for memory.

    Raises:
        ConfigError: It is neither, or can't be opened.
    """
    if where is None:
        return None
    if "://" in where:
        return _database(where)
    path = Path(where)
    if path.suffix not in JOURNAL_SUFFIXES:
        raise ConfigError(
            f"storage is a file ending in {' or '.join(JOURNAL_SUFFIXES)}, or a database's URL, "
            f"got {where!r}: write study.journal, or sqlite:///{path.with_suffix('.db')}"
        )
    _check_journal(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return optuna.storages.JournalStorage(JournalFileBackend(str(path)))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"storage {where} can't be opened ({error}): check the path, or take another"
        ) from error


def _check_journal(path: Path) -> None:
    """Refuse a journal with a line that is no entry: Optuna would end in a traceback, or write on.

    Raises:
        ConfigError: A line is none, or the last one has no end; the message has its number.
    """
    for attempt in range(_ATTEMPTS):
        try:
            lines = path.read_bytes().split(b"\n")
        except OSError:  # not there yet, or unreadable: opening it says so
            return
        if not lines[-1]:
            break
        time.sleep(_PAUSE * (attempt < _ATTEMPTS - 1))  # another worker may be writing it
    for number, line in enumerate(lines if lines[-1] else lines[:-1], start=1):
        try:
            is_entry = number < len(lines) and "op_code" in dict(json.loads(line))
        except (ValueError, TypeError, RecursionError):
            is_entry = False
        if not is_entry:
            raise ConfigError(
                f"storage {path}, line {number}, is no entry of a study: {line[:60]!r}. Remove "
                "that line and those behind it, or take another file"
            )


def _database(url: str) -> BaseStorage:
    from sqlalchemy.exc import OperationalError, SQLAlchemyError  # noqa: PLC0415 - it is slow

    # A second worker's write waits for the first's.
    engine = {"connect_args": {"timeout": 60}} if url.startswith("sqlite") else {}
    for attempt in range(_ATTEMPTS):
        try:
            return RDBStorage(
                url,
                engine_kwargs=engine,
                heartbeat_interval=_HEARTBEAT_SECONDS,
                grace_period=_GRACE_SECONDS,
            )
        except (SQLAlchemyError, ImportError, ValueError, RuntimeError) as error:
            too_late = isinstance(error, OperationalError) and "already exists" in str(error)
            if not too_late or attempt == _ATTEMPTS - 1:
                raise ConfigError(
                    f"storage {url} can't be opened ({_first_line(error)}): check the URL, that "
                    "its database is reachable, and that its driver is installed"
                ) from error
            time.sleep(_PAUSE)
    raise AssertionError("the last attempt returns or raises")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def signature() -> dict[str, Any]:
    """Return the identity of this process, so that others can tell whether it still lives."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": psutil.Process().create_time(),
    }


def fail_lost_trials(study: optuna.Study, trials: Iterable[FrozenTrial]) -> None:
    """Fail the running trials whose worker on this machine is dead.

    Heartbeats of databases do so for other machines' workers.
    """
    for trial in trials:
        if trial.state is TrialState.RUNNING and not _lives(trial):
            study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)


def _lives(trial: FrozenTrial) -> bool:
    worker = trial.user_attrs.get("worker")
    if worker is None:
        started = trial.datetime_start
        return started is None or datetime.now() - started < _UNSIGNED
    if worker["host"] != socket.gethostname():
        return True
    try:
        process = psutil.Process(worker["pid"])
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        # A later process may have the number.
        return bool(abs(process.create_time() - worker["started"]) < 1.0)
    except psutil.NoSuchProcess:
        return False


@contextmanager
def quiet_optuna() -> Iterator[None]:
    """Silence Optuna's messages that no user of `tune` can do anything about.

    Optuna logs every trial and, with a traceback, every setting that fails. Its warnings are of no
    use here either: heartbeats and some samplers are experimental, and have been for years; CMA-ES
    ignores constraints, but settings that break them are never measured; importance is of low
    values, which is how they are passed.
    """
    former = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            warnings.filterwarnings("ignore", message="Constraints have been set, but")
            warnings.filterwarnings("ignore", message="PedAnovaImportanceEvaluator computes")
            yield
    finally:
        optuna.logging.set_verbosity(former)
