"""Error of the model itself: a log-normal term beside the spread of a machine's quantities.

The draws of `sim.fitting.uncertainty` know how far quantities may be off. Kernels, interpreters
and frameworks that no quantity stands for are not in them. Measured and predicted times together
say how wide a term is needed for those.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from sim.hardware.profile import HardwareProfile
from sim.models.workload import Workload
from sim.timing.traced import scaling_spread
from zenflow.errors import ConfigError

TABLE = 0.24
"""Standard deviation of the term's logarithm, for machines of the table: from the published rows
(`zenflow study published`)."""
CALIBRATED = 0.03
"""Standard deviation of the term's logarithm for a calibrated machine, rounded up: from runs that
calibrated nothing (`zenflow study validation`)."""
COVERAGE = 0.8
"""Share of measurements that ranges are to hold."""


def left_out_of(profile: HardwareProfile, workload: Workload | None = None) -> float:
    """Return the standard deviation of the term's logarithm for predictions on a machine.

    Args:
        profile: The machine.
        workload: What it runs: a trace that is scaled from another device adds to the term.
    """
    own = CALIBRATED if "calibration" in profile.metadata else TABLE
    return math.hypot(own, scaling_spread(workload.traced, profile) if workload else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A measured time, and the range of its prediction over draws of quantities alone."""

    measured: float
    """Measured time of a step, seconds."""
    low: float
    """Lower end, seconds, of a range that holds `COVERAGE` of the draws."""
    high: float
    """Upper end of that range, seconds."""

    @property
    def needed(self) -> float:
        """Least term with which the range holds the measurement; 0 where none is needed."""
        reach = NormalDist().inv_cdf((1 + COVERAGE) / 2)
        off = math.log(self.measured / math.sqrt(self.low * self.high)) / reach
        spread = math.log(self.high / self.low) / (2 * reach)
        return math.sqrt(max(0.0, off**2 - spread**2))


def fit_left_out(outcomes: Sequence[Outcome]) -> float:
    """Return the least term with which the ranges hold `COVERAGE` of the measurements.

    Raises:
        ConfigError: There is no measurement.
    """
    if not outcomes:
        raise ConfigError("the term for what is left out needs at least one measurement")
    needed = sorted(outcome.needed for outcome in outcomes)
    return needed[math.ceil(COVERAGE * len(needed)) - 1]


def held_out(parts: Sequence[Sequence[Outcome]]) -> list[int]:
    """Return the count of each part's measurements in ranges whose term is from other parts.

    Args:
        parts: Measurements, each part of which is left out in turn; at least two parts.
    """
    counts = []
    for index, part in enumerate(parts):
        rest = [outcome for other in (*parts[:index], *parts[index + 1 :]) for outcome in other]
        term = fit_left_out(rest)
        counts.append(sum(outcome.needed <= term for outcome in part))
    return counts
