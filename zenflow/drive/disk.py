"""Calls to the file system, each of which may fail, stop half-way, or be the process's last.

Tests replace these functions to let the n-th call fail, and to kill a process at each of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil

_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "ceph", "glusterfs", "lustre")


def open_states(path: Path) -> tuple[int, bool]:
    """Open a file to read and write, made if absent; return it, and whether access is direct."""
    flags = os.O_RDWR | os.O_CREAT
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600), True
    except OSError:  # some file systems have no direct access; all else fails again here
        return os.open(path, flags, 0o600), False


def allocate(file: int, num_bytes: int) -> None:
    """Reserve a file's bytes, so that no later write lacks room."""
    os.posix_fallocate(file, 0, num_bytes)


def read(file: int, memory: np.ndarray, offset: int) -> None:
    """Fill memory, bytes in whole sectors, from a place in a file.

    Raises:
        OSError: The drive fails, or the file ends before.
    """
    _whole(os.preadv, file, memory, offset)


def write(file: int, memory: np.ndarray, offset: int) -> None:
    """Write memory, bytes in whole sectors, to a place in a file; errors as in `read`."""
    _whole(os.pwritev, file, memory, offset)


def _whole(call: Callable[..., int], file: int, memory: np.ndarray, offset: int) -> None:
    done = 0
    while done < len(memory):
        moved = call(file, [memory[done:]], offset + done)
        if moved <= 0:
            raise OSError(f"{done:,} of {len(memory):,} bytes could be moved at byte {offset:,}")
        done += moved


def sync_data(file: int) -> None:
    """Wait until the drive has all bytes that were written to a file."""
    os.fdatasync(file)


def replace_durably(path: Path, text: str) -> None:
    """Replace a file by a text: whatever happens, the file has the old text or the new one."""
    draft = path.with_suffix(".new")
    write_synced(draft, text)
    rename(draft, path)
    sync_folder(path.parent)


def write_synced(path: Path, text: str) -> None:
    """Write a new file, and wait until the drive has it."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def rename(draft: Path, path: Path) -> None:
    """Let a file take the place of another, at once."""
    os.replace(draft, path)


def sync_folder(path: Path) -> None:
    """Wait until the drive has a folder's names."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def free_bytes(path: Path) -> int:
    """Return the bytes that a program may still use on a folder's file system."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def file_system(path: Path) -> str:
    """Return the name of a folder's file system, such as "ext4"; "" where the system has none."""
    there = path.resolve()
    mounts = [
        (len(Path(mount.mountpoint).parts), mount.fstype)
        for mount in psutil.disk_partitions(all=True)
        if there.is_relative_to(mount.mountpoint)
    ]
    return max(mounts, default=(0, ""))[1]


def why_slow(path: Path) -> str | None:
    """Return why a folder's drive is likely too slow for states; None where nothing says so."""
    kind = file_system(path)
    if kind in _NETWORK:
        return f"is on a network ({kind})"
    number = path.stat().st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    for place in (device, device.resolve().parent):  # a partition's drive is one folder up
        rotates = place / "queue" / "rotational"
        if rotates.is_file():
            says = rotates.read_text().strip()
            return "says that its drive rotates, as virtual ones may too" if says == "1" else None
    return None
