"""Tape: what a schedule submits and waits for, recorded without simulating it.

Which jobs the engine's schedule submits, behind what, and what it waits for follows from blocks,
windows and memory. How fast the machine is decides only when it happens. So a schedule is
recorded once, on a machine that takes no time, and replayed on as many as there are. Seconds are
sums of times of the machine, such as a layer's forward: see `times_of`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from sim.timing.costs import StepCosts
from zenflow.errors import ZenFlowError

LANES = ("device", "d2h", "h2d", "host")
"""Lanes of a tape, by their number in it."""


class CannotRecordError(ZenFlowError):
    """A schedule does what no tape can hold: it is to be simulated."""


Seconds = tuple[tuple[int, float], ...]
"""Times of the machine by their place in `times_of`, and how often each is taken."""

PER_UNIT = ("pack_bandwidth", "unpack_bandwidth", "intake_bandwidth", "device_update")
"""Rates of the engine's parts, of which one over each is a time."""
TIMES = ("copy", "step", "host_task", "select", "bucket")
"""Seconds of the engine's parts."""
OTHERS = (*PER_UNIT, *TIMES, "elementwise", "latency")
"""Times of `times_of` behind those of segments; "elementwise" is one over a rate, too."""


def times_of(costs: StepCosts) -> list[float]:
    """Return what a machine takes for one of everything, seconds.

    Forward of each segment, backward of each, and `OTHERS`: of rates the seconds of one unit.
    """
    hardware = costs.hardware
    rates = {name: getattr(hardware.overheads, name) for name in PER_UNIT}
    rates["unpack_bandwidth"] = rates["unpack_bandwidth"] or rates["pack_bandwidth"]
    others = {
        **{name: 1.0 / figure.value for name, figure in rates.items()},
        **{name: getattr(hardware.overheads, name).value for name in TIMES},
        "elementwise": 1.0 / costs.elementwise_bandwidth,
        "latency": hardware.link.latency.value,
    }
    segments = costs.segments
    passes = [*(s.forward for s in segments), *(s.backward for s in segments)]
    return [*passes, *(others[name] for name in OTHERS)]


class Job(NamedTuple):
    """One job; jobs that it waits for by how many were submitted since."""

    lane: int
    is_awaited: bool
    seconds: Seconds
    num_bytes: float
    steps: float
    counted: float
    step: int
    deadline: int
    rank: int
    after: tuple[int, ...]


class Operation(NamedTuple):
    """A wait of the schedule itself: for a job, by how many are submitted since, or seconds."""

    awaited: int | None
    sleep: Seconds
    submitted: int
    """Number of the step's jobs that are submitted before."""


class Gap(NamedTuple):
    """A wait of backward for room in the ring: from the end of a job to that of others."""

    passed: int
    room: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class Step:
    """One step of a tape. All references are relative, so that equal steps are equal."""

    jobs: list[Job] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    """Jobs of gaps count from the step's first one."""
    stall_begin: int = 0
    """Operation, from the step's first one on, with which the device begins to wait."""

    def moved(self, steps: int) -> Step:
        """Return the same, so many steps later."""
        jobs = [
            job._replace(step=job.step + steps, deadline=job.deadline + steps) for job in self.jobs
        ]
        return Step(
            jobs=jobs, operations=self.operations, gaps=self.gaps, stall_begin=self.stall_begin
        )
