"""A cap on a process's memory, by a control group of Linux of its own."""

from __future__ import annotations

import os
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from zenflow.host.limits import control_groups


@dataclass(frozen=True, slots=True)
class _Files:
    """Names of a control group's files."""

    limit: str
    used: str
    peak: str


_VERSIONS = (
    _Files("memory.max", "memory.current", "memory.peak"),
    _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.max_usage_in_bytes"),
)


class MemoryCap:
    """A new control group for one process; beyond its limit the system kills that process."""

    def __init__(self) -> None:
        """Make the group below this process's own, or below one above it.

        Raises:
            OSError: The system lets this process make none that counts memory.
        """
        found = (self._made(folder) for folder in control_groups("memory"))
        made = next(filter(None, found), None)
        if made is None:
            raise OSError("no control group that caps memory can be made here")
        self._folder, self._files = made

    @staticmethod
    def _made(parent: Path) -> tuple[Path, _Files] | None:
        folder = parent / f"zenflow-cap-{uuid.uuid4().hex}"
        with suppress(OSError):
            folder.mkdir()
            for files in _VERSIONS:
                if os.access(folder / files.limit, os.W_OK):
                    return folder, files
            folder.rmdir()  # of version 2, whose parent gives it no memory controller
        return None

    def take(self, process: int) -> None:
        """Let a process, and what it allocates from now on, be in the group."""
        (self._folder / "cgroup.procs").write_text(str(process))

    @property
    def used(self) -> int:
        """Bytes that are charged to the group."""
        return int((self._folder / self._files.used).read_text())

    @property
    def peak(self) -> int:
        """Most bytes that were ever charged to the group."""
        return int((self._folder / self._files.peak).read_text())

    def limit(self, num_bytes: int) -> None:
        """Cap the group's memory."""
        (self._folder / self._files.limit).write_text(str(num_bytes))

    def close(self) -> None:
        """Remove the group, whose process has ended."""
        self._folder.rmdir()
