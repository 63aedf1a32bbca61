"""The process that an optimizer belongs to: a forked child has its memory, but not its threads."""

from __future__ import annotations

import os


class OwnProcess:
    """Remembers the process in which it was made.

    A child of `os.fork`, such as a DataLoader's worker, has copies of all objects, but no threads.
    Locks keep their state there, so that a wait for a thread or a lock lasts for ever.
    """

    def __init__(self) -> None:
        """Remember the calling process."""
        self._id = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether the calling process is the one that was remembered."""
        return os.getpid() == self._id

    def check(self) -> None:
        """Refuse a call in another process than the one that was remembered.

        Raises:
            RuntimeError: The calling process is another one.
        """
        if os.getpid() != self._id:
            raise RuntimeError(
                f"the optimizer belongs to process {self._id}, and this is process {os.getpid()}, "
                "a fork of it that has none of its threads: use it there, or call close() and "
                "make a new one here"
            )
