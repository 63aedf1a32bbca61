"""Parts of a step by formula, for many machines: jobs of a lane, and a window's steps."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sim.schedules.intake import intake_of
from sim.timing.block_plan import BlockPlan, Structure
from sim.timing.costs import StepCosts
from sim.timing.host_passes import HostPass
from zenflow.config import ZenFlowConfig

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class HostTasks:
    """A task of the host for each of L segments; no bytes are no task."""

    num_bytes: Array
    """Bytes of DRAM, (L,)."""
    steps: Array
    """AdamW steps of an element, (L,)."""

    @classmethod
    def none(cls, count: int) -> HostTasks:
        """Return no tasks, to be added to."""
        return cls(np.zeros(count), np.zeros(count))

    def add(self, place: int, work: HostPass) -> None:
        """Add work to a segment's task."""
        self.num_bytes[place] += work.num_bytes
        self.steps[place] += work.steps


@dataclass(frozen=True, slots=True)
class WindowPhase:
    """One step of a window; each an array over segments in backward order."""

    uploads: Array
    """Bytes that land on the device."""
    intake: HostTasks
    """Work on gradients whose windows don't end."""
    update: HostTasks
    """Work on windows that end."""
    selected: Array
    """Number of blocks that choose their columns anew where a selection is due."""


@dataclass(frozen=True, slots=True)
class Windows:
    """A steady window of a structure."""

    plan: BlockPlan
    """Plan of its blocks."""
    phases: tuple[WindowPhase, ...]
    """Uploads, host work and selections of each step of a window."""
    moved: tuple[float, ...]
    """Number of elements of each segment that fresh steps move in a step."""


@functools.lru_cache(maxsize=256)  # a sweep asks for the same ones again and again
def windows_of(structure: Structure) -> Windows:
    """Return the steady windows of a structure, by the engine's calendar."""
    costs, config = structure.costs, structure.config
    plan = BlockPlan(costs, config)
    moved = plan.moved(plan.calendar(), config.full_warm_up_rounds + 1)
    return Windows(plan, tuple(_phases(plan, costs, config)), tuple(moved))


def _phases(plan: BlockPlan, costs: StepCosts, config: ZenFlowConfig) -> list[WindowPhase]:
    """Return the uploads, host work and selections of each step of a steady window."""
    calendar, intake = plan.calendar(), intake_of(plan, costs)
    count, size = len(costs.segments), costs.dtype_bytes
    window, lag = config.update_interval, config.effective_lag()
    steps = config.full_warm_up_rounds + 3 * window + lag
    uploads = np.zeros((steps + lag + 1, count))
    phases = []
    for step in range(1, steps + 1):
        taken, update = HostTasks.none(count), HostTasks.none(count)
        selected = np.zeros(count)
        for index in reversed(range(count)):
            taken.add(count - 1 - index, intake.stage(index))
        for index, work in enumerate(intake.take_in(calendar, step)):
            taken.add(count - 1 - index, work)
        for block in plan.blocks:
            if not calendar.is_due(block.index, step):
                continue
            place = count - 1 - block.segment
            if block.elements:
                update.add(place, intake.end(block, calendar.lag(step)))
                uploads[step + calendar.lag(step), place] += block.elements * size
                selected[place] += block.shape.num_important > 0
            calendar.close(block.index, step)
        phases.append(WindowPhase(uploads[step], taken, update, selected))
    return phases[-window:]


@dataclass(frozen=True, slots=True)
class Jobs:
    """Queue of a lane: the segments with bytes, and the work left from each of them on."""

    columns: NDArray[np.intp]
    """Places of the segments with bytes."""
    bytes_left: Array
    """Bytes from each of them on."""
    seconds_left: Array
    """Seconds from each of them on, beside bytes over a rate."""

    @classmethod
    def of(cls, num_bytes: Array, fixed: float, packing: float = np.inf) -> Jobs:
        """Return the jobs of so many bytes for each segment; none where there are no bytes."""
        columns = np.flatnonzero(num_bytes)
        sizes = num_bytes[columns]
        seconds = fixed + sizes / packing
        return cls(columns, np.cumsum(sizes[::-1])[::-1], np.cumsum(seconds[::-1])[::-1])

    def ended(self, ready: Array, rate: Array) -> Array:
        """Return the time at which a lane of this rate has served all, (N,); -inf without jobs."""
        if not len(self.columns):
            return np.full(len(rate), -np.inf)
        left = self.bytes_left / rate[:, None] + self.seconds_left
        ends: Array = (ready[:, self.columns] + left).max(axis=1)
        return ends


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
    none. Uploads that read it, or what was sent before, must have ended as well."""

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
        """Return the end of each job, (N, 2 L), if heads wait for begins and tails for ends."""
        ready = np.stack([begun, passed], axis=2).reshape(len(rate), -1)
        ready = np.where(self.num_bytes > 0, ready, -np.inf)
        return served(ready, self.fixed + self.num_bytes / rate[:, None])


def served(ready: Array, lengths: Array) -> Array:
    """Return the end of each job of a lane that serves them in turn, (N, L)."""
    total = np.cumsum(lengths, axis=1)
    ends: Array = total + np.maximum.accumulate(ready - (total - lengths), axis=1)
    return ends
