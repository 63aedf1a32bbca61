"""Span: one thing that ran on one lane, measured by the engine or predicted by the simulator.

Seconds and bytes throughout. Both sides use the same lanes and span names, so every figure and
every comparison takes either:

=========  ====================================================
lane       span names
=========  ====================================================
device     forward, backward, step, stall:<cause>
d2h        grads
h2d        params
weights *  weights (streamed), to the host (d2h) or the device (h2d)
host       accumulate, adam
drive      read, write: states on a drive
=========  ====================================================
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

LANES: tuple[str, ...] = ("device", "d2h", "h2d", "host")
"""Lanes that every timeline shares, in the order in which pictures show them."""

STALL_PREFIX = "stall:"
"""Prefix of the names of spans that are waits: these show in a lane and are no work."""


@dataclass(frozen=True, slots=True)
class Span:
    """One thing that ran on one lane, from ``start`` to ``end`` in seconds on a common clock.

    Raises:
        ValueError: The times aren't finite and in order, or the bytes are negative.
    """

    lane: str
    """One of ``LANES``, or a lane of a simulator's own (NVMe, say)."""

    name: str
    """Name of the work; the module's docstring has the names of each lane."""

    start: float
    """Time at which the work began, in seconds."""

    end: float
    """Time at which the work ended, in seconds."""

    step: int
    """Number of the optimizer step that caused it, from 1."""

    num_bytes: int = 0
    """Number of bytes moved; 0 for what moves none."""

    def __post_init__(self) -> None:
        """Check the order of times."""
        if not (math.isfinite(self.start) and math.isfinite(self.end) and self.start <= self.end):
            raise ValueError(
                f"a span must start before it ends, got {self.start} to {self.end} for "
                f"{self.lane}/{self.name}: take both times from one clock"
            )
        if self.num_bytes < 0:
            raise ValueError(f"num_bytes must be >= 0, got {self.num_bytes}: count moved bytes")

    @property
    def seconds(self) -> float:
        """Length of the span."""
        return self.end - self.start

    @property
    def is_stall(self) -> bool:
        """Whether the lane waited during this span."""
        return self.name.startswith(STALL_PREFIX)


def lane_order(lane: str) -> tuple[int, str]:
    """Return a sort key: the common lanes first, others by name."""
    return (LANES.index(lane) if lane in LANES else len(LANES), lane)


def lanes_of(spans: Iterable[Span]) -> tuple[str, ...]:
    """Return the lanes with spans: those of ``LANES`` first, then others by name."""
    return tuple(sorted({span.lane for span in spans}, key=lane_order))
