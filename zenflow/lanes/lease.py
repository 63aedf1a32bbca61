"""Leases: memory that knows its users, so that work finds out what has to end before it.

Several threads and streams use the same memory: copies fill it, host tasks read and change it,
uploads read it. One rule orders them: work that touches memory takes its lease, and what the lease
lists has to end first. No other module says what a copy or a host task waits for.

The training thread queues all work, so that it alone takes leases. Work may end at any time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import filterfalse
from operator import attrgetter

from zenflow.lanes.completion import Completion, unique

_has_succeeded = attrgetter("has_succeeded")
"""Passes over work in C: a step asks hundreds of times, on the thread that launches kernels."""


class Lease:
    """Users of one piece of memory, which may not have ended.

    The memory holds one content after another, such as the gradients of one step after those of
    another. Work that fills the memory with the present content waits for all users of the former
    one. Work that reads waits for those that fill.

    Example:
        >>> copied, stepped, next_copied = map(Completion, ("copy", "step", "next copy"))
        >>> staging = Lease()
        >>> take(copied, fills=[staging])
        []
        >>> [work.what for work in take(stepped, reads=[staging])]
        ['copy']
        >>> staging.renew()
        >>> [work.what for work in take(next_copied, fills=[staging])]
        ['copy', 'step']
    """

    __slots__ = ("_before", "_readers", "_writers")

    def __init__(self, before: Iterable[Completion] = ()) -> None:
        """Start with a content that nobody has begun to write.

        Args:
            before: Work on the same bytes under another lease, which has to end before any write.
        """
        self._before = list(before)
        self._writers: list[Completion] = []
        self._readers: list[Completion] = []

    @property
    def users(self) -> list[Completion]:
        """All work on the memory that may not have ended, on former contents too."""
        everyone = (*self._before, *self._writers, *self._readers)
        return list(filterfalse(_has_succeeded, everyone))

    def renew(self) -> None:
        """Let a new content follow: its writers wait for all users so far."""
        self._before, self._writers, self._readers = self.users, [], []


def take(
    work: Completion,
    *,
    reads: Sequence[Lease] = (),
    fills: Sequence[Lease] = (),
    changes: Sequence[Lease] = (),
) -> list[Completion]:
    """Enter work as a user of some memory, and return what has to end before it, each once.

    Args:
        work: Work that is about to be queued.
        reads: Leases of memory that the work reads.
        fills: Leases of memory that the work writes a part of; others may write other parts of the
            same content at the same time.
        changes: Leases of memory that the work reads and writes, alone.
    """
    before: list[Completion] = []
    for lease in reads:
        before += lease._writers
        lease._readers.append(work)
    for lease in fills:
        before += lease._before
        lease._writers.append(work)
    for lease in changes:
        before += lease.users
        lease._before, lease._writers, lease._readers = [work], [work], []
    return unique(filterfalse(_has_succeeded, before))
