"""The choice of a folder: whether it can have states, and who has it."""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path

from zenflow.drive import disk

_log = logging.getLogger(__name__)

_FILE = "lock"
_in_use: set[tuple[int, int]] = set()
"""Folders of this process's optimizers, by device and number: a process's lock ignores its own."""


class FolderLock:
    """Lock of a folder, which ends with the process; a forked child does not have it."""

    def __init__(self, path: Path) -> None:
        """Take the lock.

        Raises:
            ValueError: Another optimizer has it.
        """
        found = path.stat()
        self._key = (found.st_dev, found.st_ino)
        self._file = -1
        if self._key in _in_use:
            raise ValueError(f"{path} is in use by another optimizer of this process: close it")
        self._file = os.open(path / _FILE, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            who = os.pread(self._file, 32, 0).decode(errors="replace").strip()
            os.close(self._file)
            raise ValueError(
                f"{path} is in use by process {who or 'of unknown number'}: wait for its end, or "
                "choose another folder"
            ) from error
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, str(os.getpid()).encode(), 0)
        _in_use.add(self._key)

    def end(self) -> None:
        """Give the lock back."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            _in_use.discard(self._key)


def check_folder(path: Path) -> None:
    """Refuse a folder that can't hold states; warn of a drive that is likely too slow.

    Raises:
        ValueError: The folder is missing, can't be written to, or is in memory.
    """
    if not path.is_dir():
        raise ValueError(f"state_dir={path} is no folder: make it on a local drive")
    if not os.access(path, os.W_OK | os.X_OK) or os.statvfs(path).f_flag & os.ST_RDONLY:
        raise ValueError(
            f"state_dir={path} can't be written to: choose a folder of a drive that can"
        )
    if (kind := disk.file_system(path)) in ("tmpfs", "ramfs"):
        raise ValueError(
            f"state_dir={path} is in memory ({kind}): states there save none. Choose a folder on "
            "a drive, or leave state_dir out"
        )
    if (why := disk.why_slow(path)) is not None:
        _log.warning("state_dir=%s %s: states may come later than steps need them", path, why)
