"""Ring jobs: when gradients leave a GPU through its ring, by formula for many machines."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sim.block_plan import BlockPlan
from sim.engine_memory import released_ring

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Released:
    """Times of a step in release mode, (N, L) over segments in the order of backward, or (N,)."""

    begun: Array
    passed: Array
    """When backward has passed a segment."""
    stepped: Array
    """When the device has taken its own step."""
    copied: Array
    pressed: Array
    """Seconds for which the end of backward waits for room in the ring."""
    is_free: NDArray[np.bool_]
    """Whether it waits nowhere else."""


@dataclass(frozen=True, slots=True)
class RingJobs:
    """Copies out of the ring of `sim.schedules.ring`: of a segment's head, then of its tail."""

    num_bytes: Array
    """Of heads and tails in turn; a head of none is no copy."""
    fixed: Array
    """Seconds beside them."""
    room: NDArray[np.intp]
    """For each segment the job that has to be done when its backward ends; -1 is none."""

    @classmethod
    def of(cls, plan: BlockPlan, grads: Array, fixed: float) -> RingJobs:
        """Return the jobs of these gradients, in the order of backward."""
        size = 1 if not plan.deferred else grads.sum() / plan.deferred
        tallest = max((block.shape.num_rows for block in plan.blocks), default=0)
        ring = float(released_ring(int(grads.sum()), int(tallest * size)))
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
