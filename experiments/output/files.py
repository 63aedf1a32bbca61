"""Files that are replaced by a rename, so that a reader never sees half of one."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zenflow.errors import naming_file


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a draft that takes the place of ``path``, unless writing it fails.

    Raises:
        OSError: It does; the error names ``path``.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with naming_file(path, draft):
            yield draft
            draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` by a file with this text, on the disk when the call returns."""
    with replacing(path) as draft, open(draft, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fsync_folder(path.parent)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace ``path`` by ``value`` as strict JSON (a number that is not finite becomes null)."""
    write_text(path, json.dumps(strict(value), indent=2, allow_nan=False) + "\n")


_HAS_NO_FLUSH = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF}
"""Error codes of file systems that can't flush a directory, such as CIFS and some of FUSE's."""
_MAY_NOT_OPEN = {errno.EACCES, errno.EPERM, errno.EISDIR}
"""Error codes of file systems that let nobody open a directory."""


def fsync_folder(folder: Path) -> None:
    """Flush a directory's entries, so that a rename in it survives a power cut.

    Where a file system has no such thing, a rename is as durable as it gets.

    Raises:
        OSError: The disk is full or fails, or there is no such directory.
    """
    if os.name == "nt":
        return  # Windows opens no directories
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        if error.errno in _HAS_NO_FLUSH | _MAY_NOT_OPEN:
            return
        raise
    try:
        with naming_file(folder):
            os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _HAS_NO_FLUSH:
            raise
    finally:
        os.close(descriptor)


_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)
"""Error codes of file systems without locks."""


def lock(descriptor: int) -> None:
    """Hold an open file against other processes, where there are locks.

    Raises:
        BlockingIOError: Another one holds it.
    """
    try:
        import fcntl  # not on Windows
    except ImportError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


def free_space(folder: Path) -> int | None:
    """Return the bytes that are free where a folder lies, or will lie.

    None where its file system won't say: some of a network report zeros.
    """
    there = next((path for path in (folder, *folder.absolute().parents) if path.is_dir()), folder)
    try:
        usage = shutil.disk_usage(there)
    except OSError:
        return None
    return usage.free if usage.total else None


def strict(value: Any) -> Any:
    """Return a value as strict JSON has it: None for numbers that are not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    return value
