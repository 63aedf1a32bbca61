"""Ring jobs: when gradients leave a GPU through its ring, by formula for many machines."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Released:
    """Seconds since the begin of a step in release mode, on N machines.

    What each of L segments has is (N, L), in the order of backward; the rest is (N,).
    """

    begun: Array
    """Begin of each segment's backward."""
    passed: Array
    """End of each segment's backward."""
    stepped: Array
    """End of the device's own update."""
    copied: Array
    """Time by which the gradients of each segment, and of all before, are on the host."""
    pressed: Array
    """Length of the wait for room in the ring when backward ends."""
    is_free: NDArray[np.bool_]
    """Whether backward waits for room at its end alone, if at all."""


@dataclass(frozen=True, slots=True)
class RingJobs:
    """Copies out of the ring of `sim.schedules.ring`: two of each of L segments.

    A segment's tail is what the ring may still hold when backward goes on; its head is the rest,
    which is copied while the segment's backward runs.
    """

    num_bytes: Array
    """Bytes of each copy, (2 L,): a segment's head, its tail, the next segment's head, and so on.
    No bytes are no copy."""
    fixed: Array
    """Seconds of each copy beside those of its bytes, (2 L,)."""
    room: NDArray[np.intp]
    """Index of the copy that must end before backward goes on behind each segment, (L,); -1 is
    none."""

    @classmethod
    def of(cls, grads: Array, fixed: float, ring: float) -> RingJobs:
        """Return the copies of a step.

        Args:
            grads: Bytes of each segment's gradients, (L,), in the order of backward.
            fixed: Seconds of a copy beside those of its bytes.
            ring: Bytes that the ring holds.
        """
        tails = np.minimum(grads, ring)
        sizes = np.stack([grads - tails, tails], axis=1).ravel()
        room = [cls._room(sizes, 2 * index + 1, ring) for index in range(len(grads))]
        return cls(sizes, np.where(sizes > 0, fixed, 0.0), np.array(room))

    @staticmethod
    def _room(sizes: Array, place: int, ring: float) -> int:
        if not sizes[place]:
            return -1  # nothing is sent, so nothing is waited for
        filled = 0.0
        for job in range(place, -1, -1):
            filled += sizes[job]
            if sizes[job] and filled > ring:
                return job
        return -1

    def ended(self, begun: Array, passed: Array, rate: Array) -> Array:
        """Return when each job ends, (N, 2 L), if heads wait for begins and tails for ends."""
        ready = np.stack([begun, passed], axis=2).reshape(len(rate), -1)
        ready = np.where(self.num_bytes > 0, ready, -np.inf)
        return served(ready, self.fixed + self.num_bytes / rate[:, None])


def served(ready: Array, lengths: Array) -> Array:
    """Return when a lane that serves jobs in turn ends each, (N, L); see the module."""
    total = np.cumsum(lengths, axis=1)
    ends: Array = total + np.maximum.accumulate(ready - (total - lengths), axis=1)
    return ends
