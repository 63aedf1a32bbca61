"""One run to a folder: a lock that the kernel releases when its process ends, however it ends."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from experiments.output.files import lock
from zenflow.errors import ConfigError

LOCK = ".lock"
"""The file in the run's folder; it says who holds it."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make a folder if it is missing, and hold it against other processes.

    Raises:
        ConfigError: Another process holds it, or it can't be written.
    """
    try:
        is_new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = _take(folder)
    except OSError as error:
        raise ConfigError(
            f"a run's folder must be writable, but {folder} is not ({error.strerror}): choose "
            "another with --out; to go on with a run, copy it to where it can be written and "
            "--resume the copy"
        ) from error
    try:
        yield
    finally:
        with suppress(OSError):
            (folder / LOCK).unlink()  # while it is held: nobody waits for this file
        os.close(descriptor)
        if is_new:
            with suppress(OSError):
                folder.rmdir()  # a run that never began leaves nothing behind


def _take(folder: Path) -> int:
    path = folder / LOCK
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _lock(descriptor, folder)
            # Whoever held it may have removed the file between our open and our lock.
            with suppress(FileNotFoundError):
                if os.fstat(descriptor).st_ino == path.stat().st_ino:
                    break
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    holder = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": " ".join(sys.argv),
    }
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, (json.dumps(holder) + "\n").encode(), 0)
    return descriptor


def _lock(descriptor: int, folder: Path) -> None:
    try:
        lock(descriptor)
    except BlockingIOError as error:
        raise ConfigError(
            f"one run at a time may use a folder, but {folder} is in use by "
            f"{_holder(descriptor)}: wait for it or end it, or choose another --out"
        ) from error


def _holder(descriptor: int) -> str:
    try:
        found = json.loads(os.pread(descriptor, 1 << 16, 0))
        return (
            f"process {found['pid']} on {found['host']} since {found['since']} "
            f"({found['command']})"
        )
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"  # which has not said yet who it is
