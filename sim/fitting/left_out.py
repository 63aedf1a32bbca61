"""Error of the model itself: a log-normal term beside the spread of a machine's quantities.

The draws of `sim.fitting.uncertainty` know how far quantities may be off. Kernels, interpreters
and frameworks that no quantity stands for are not in them. Measured and predicted times together
say how wide a term is needed for those. Runs of others are slower than predicted far more often
than faster: threads, slots and settings that nobody states cost time. So the term of a published
kind of run has a spread of its own on either side.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from sim.fitting.regimes import regime_of
from sim.hardware.profile import HardwareProfile
from sim.models.workload import Workload
from sim.simulate import Strategy
from sim.timing.costs import StepCosts
from sim.timing.traced import scaling_spread
from zenflow.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A factor on a time whose logarithm is normal on either side of its median, which is 1.

    Examples:
        >>> term = LeftOut(fast=0.1, slow=0.5)
        >>> round(term.factor(-1.0), 2), term.factor(0.0), round(term.factor(1.0), 2)
        (0.9, 1.0, 1.65)
    """

    fast: float
    """Standard deviation of the logarithm on the side of times below the prediction."""
    slow: float
    """Standard deviation of the logarithm on the side of times above the prediction."""

    def __post_init__(self) -> None:
        """Refuse spreads below 0."""
        if not (self.fast >= 0 and self.slow >= 0):
            raise ConfigError(
                f"left_out must be at least 0 on both sides, got {self.fast} and {self.slow}: "
                "it is a spread"
            )

    def factor(self, normal: float) -> float:
        """Return the factor that a value of a standard normal distribution stands for."""
        return math.exp((self.slow if normal > 0 else self.fast) * normal)


TABLE = 0.28
"""Standard deviation of the term's logarithm, for machines of the table: from the published rows
(`zenflow study published`)."""
BY_REGIME: Mapping[str, LeftOut] = {
    "offload": LeftOut(fast=0.09, slow=0.68),
    "launch-bound": LeftOut(fast=0.0, slow=0.65),
    "several hosts": LeftOut(fast=0.0, slow=0.3),
    "devices, no offload": LeftOut(fast=0.0, slow=0.45),
    "device alone": LeftOut(fast=0.02, slow=0.27),
    "the host's pass": LeftOut(fast=0.0, slow=0.31),
}
"""Terms for machines of the table and systems that others run, by `sim.fitting.regimes.Regime`,
and of a host's pass alone: from the published rows of each kind."""
CALIBRATED = 0.03
"""Standard deviation of the term's logarithm for a calibrated machine, rounded up: from runs that
calibrated nothing (`zenflow study validation`)."""
COVERAGE = 0.8
"""Share of measurements that ranges are to hold."""
_ROUNDING = 1e-9
"""Part of a source that sums of shares may be off by."""


def left_out_of(profile: HardwareProfile, workload: Workload | None = None) -> float:
    """Return the standard deviation of the term's logarithm for predictions on a machine.

    Args:
        profile: The machine.
        workload: What it runs: a trace that is scaled from another device adds to the term.
    """
    own = CALIBRATED if "calibration" in profile.metadata else TABLE
    return math.hypot(own, scaling_spread(workload.traced, profile) if workload else 0.0)


def left_out_in(strategy: Strategy, costs: StepCosts) -> LeftOut:
    """Return the term for the time of a step.

    The engine's own strategies, and calibrated machines, have one spread for both sides.

    Args:
        strategy: What runs.
        costs: Of one step, from a workload.
    """
    machine, workload = costs.hardware, costs.workload
    if strategy.config is not None or "calibration" in machine.metadata:
        own = left_out_of(machine, workload)
        return LeftOut(own, own)
    term = BY_REGIME[regime_of(costs, strategy)]
    scaled = scaling_spread(workload.traced, machine) if workload else 0.0
    return LeftOut(math.hypot(term.fast, scaled), math.hypot(term.slow, scaled))


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

    def is_held(self, term: LeftOut) -> bool:
        """Return whether the range holds the measurement with a term."""
        is_slow = self.measured > math.sqrt(self.low * self.high)
        return self.needed <= (term.slow if is_slow else term.fast)


def fit_sides(sources: Sequence[Sequence[Outcome]]) -> LeftOut:
    """Return the least term with which as many measurements lie beyond either end.

    Sources count alike, however many measurements each has: those of one source share its hosts
    and its settings, and are off together. Where one source is more than the part that may lie
    beyond an end, it would decide alone, and measurements count alike.

    Args:
        sources: Measurements of each source.

    Raises:
        ConfigError: There is no measurement.
    """
    are_alike = len(sources) * (1 - COVERAGE) / 2 >= 1 - _ROUNDING
    weighted = [
        (1.0 / len(source) if are_alike else 1.0, each) for source in sources for each in source
    ]
    if not weighted:
        raise ConfigError("the term for what is left out needs at least one measurement")
    enough = (1 + COVERAGE) / 2 * sum(weight for weight, _ in weighted)
    sides = []
    for side in (LeftOut(0.0, math.inf), LeftOut(math.inf, 0.0)):
        needed = sorted((0.0 if each.is_held(side) else each.needed, w) for w, each in weighted)
        counts = itertools.accumulate(weight for _, weight in needed)
        sides.append(
            next(
                (term for (term, _), count in zip(needed, counts, strict=True)
                 if count >= enough - _ROUNDING),
                needed[-1][0],
            )
        )  # fmt: skip
    return LeftOut(*sides)


def fit_left_out(outcomes: Sequence[Outcome]) -> float:
    """Return the least term with which the ranges hold `COVERAGE` of the measurements.

    Raises:
        ConfigError: There is no measurement.
    """
    if not outcomes:
        raise ConfigError("the term for what is left out needs at least one measurement")
    needed = sorted(outcome.needed for outcome in outcomes)
    return needed[math.ceil(COVERAGE * len(needed)) - 1]


def held_out(sources: Sequence[Sequence[Outcome]]) -> list[int]:
    """Return the count of each source's measurements in ranges whose term is from the others.

    Args:
        sources: Measurements of each source; at least two sources.
    """
    counts = []
    for index, source in enumerate(sources):
        term = fit_sides([*sources[:index], *sources[index + 1 :]])
        counts.append(sum(outcome.is_held(term) for outcome in source))
    return counts
