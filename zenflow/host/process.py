"""The process that something belongs to: a forked child has its memory, but not its threads."""

from __future__ import annotations

import os


class OwnProcess:
    """Remembers the process in which it was made.

    A child that `os.fork` makes, as DataLoader workers are made, has a copy of every object. Locks
    stay in it as they were, and threads are not there: who waits for one waits for ever.
    """

    def __init__(self) -> None:
        """Belong to this process."""
        self._id = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether the calling process is the one."""
        return os.getpid() == self._id

    def check(self) -> None:
        """Return in the process that the optimizer belongs to.

        Raises:
            RuntimeError: This is another one.
        """
        if not self.is_here:
            raise RuntimeError(
                f"the optimizer belongs to process {self._id}, and this is process {os.getpid()}, "
                "a fork of it that has none of its threads: use it there, or call close() and "
                "make a new one here"
            )
