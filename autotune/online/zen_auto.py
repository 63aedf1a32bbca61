"""ZenAuto: the window length S follows the training.

The rule of ZenFlow's paper (arXiv 2505.12242): a window should end when the gradient that has
accumulated for the deferred columns has become comparable to what the important ones get every
step. Early in training gradients point the same way step after step, the accumulated one grows
with n and windows are short; later noise dominates, it grows with sqrt(n) only, and they get
longer.

Comparable means per column: with A the squared norm of the accumulated gradient of (1 - k) of the
columns and I that of a step's gradient of the other k of them,

    ratio(n) = sqrt((A / (1 - k)) / (I / k))

compares the root mean squares of one deferred and one important column. So the same training asks
for about the same S at every k; norms of the two sides as they are would not: the deferred side
has most columns, and nearly always most of the norm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from zenflow.controller import AbstractIntervalController
from zenflow.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from zenflow.report import StepReport

_LOG_MOST = math.log(1e6)
"""Windows that would be longer than this many steps are as good as endless."""


class ZenAuto(AbstractIntervalController):
    """Chooses S such that a window ends when its gradient has become comparable.

    The S that is wanted is the smallest n with ratio(n) >= ``threshold``. Ages up to the S in
    force are observed, at every step with rolling windows and as they pass with aligned ones;
    beyond them the ratio goes on as a power of n, with the exponent between age 1 and S.

    A decision needs a wanted S that has been off in one direction for a whole window, so that
    there is at most one a window; it at most doubles S.

    Examples:
        >>> controller = ZenAuto(largest=8)
        >>> controller.interval
        1
    """

    measures_windows = True

    def __init__(
        self,
        *,
        threshold: float = 1.0,
        decay: float = 0.95,
        least: int = 1,
        largest: int = 16,
        start: int = 1,
        warm_up: int = 10,
        hysteresis: float = 0.25,
    ) -> None:
        """Start with nothing observed.

        Args:
            threshold: Ratio at which a window should end.
            decay: Of the sums from which ratios come, a step, in [0, 1).
            least: Smallest S.
            largest: Largest S; blocks are cut fine enough for it.
            start: S until the first decision.
            warm_up: Steps without a decision.
            hysteresis: Share of S by which the n at which the ratio reaches the threshold must
                be off before S moves, beside a whole step.

        Raises:
            ConfigError: A setting breaks its rule.
        """
        rules = [
            (threshold > 0, f"threshold must be positive, got {threshold}"),
            (0 <= decay < 1, f"decay must be in [0, 1), got {decay}"),
            (warm_up >= 0, f"warm_up must be at least 0, got {warm_up}"),
            (hysteresis >= 0, f"hysteresis must be at least 0, got {hysteresis}"),
            (least <= start <= largest, f"start must be in {least}..{largest}, got {start}"),
        ]
        broken = [text for holds, text in rules if not holds]
        if broken:
            raise ConfigError(f"ZenAuto: {'; '.join(broken)}: leave it out for the default")
        self.threshold = threshold
        self.decay = decay
        self.warm_up = warm_up
        self.hysteresis = hysteresis
        self.interval = start
        self._cut_for = self.largest_interval = largest
        self._sums: dict[int, tuple[float, float]] = {}
        self._streak = 0
        self.set_bounds(least, largest)

    def set_bounds(self, least: int, largest: int) -> None:
        """Keep S within bounds from the next step on; S moves only if it is outside of them.

        Raises:
            ConfigError: They are not 1 <= least <= largest, or the largest is above the one that
                blocks are cut for.
        """
        if not 1 <= least <= largest <= self._cut_for:
            raise ConfigError(
                f"bounds of S must have 1 <= least <= largest <= {self._cut_for}, got "
                f"{least} and {largest}: blocks are cut for the largest at the start"
            )
        self.least, self.largest = least, largest
        self._move(self.interval)

    def next_interval(self, report: StepReport) -> int:
        """Return S after this report."""
        self._observe(report)
        # A report from before the last decision, which came late, says nothing about it.
        if report.step > self.warm_up and report.update_interval == self.interval:
            self._decide()
        return self.interval

    def _observe(self, report: StepReport) -> None:
        """Move the sums of every age on; a report with numbers that can't be used is left out."""
        norms = report.windows
        if not all(math.isfinite(n.accumulated) and math.isfinite(n.important) for n in norms):
            return
        oldest = max([report.update_interval, *(n.age for n in norms)])
        self._sums = {
            age: (self.decay * accumulated, self.decay * important)
            for age, (accumulated, important) in self._sums.items()
            if age <= oldest
        }
        k = report.topk_ratio
        for n in norms:
            accumulated, important = self._sums.get(n.age, (0.0, 0.0))
            # Without important columns any gradient is more than theirs.
            accumulated += n.accumulated * (k or 1.0)
            self._sums[n.age] = accumulated, important + n.important * (1.0 - k)

    def ratio(self, age: int) -> float | None:
        """Return the ratio of windows of an age, as observed; None without any gradient."""
        accumulated, important = self._sums.get(age, (0.0, 0.0))
        if important > 0:
            return math.sqrt(accumulated / important)
        return math.inf if accumulated > 0 else None

    def wanted(self) -> float | None:
        """Return the n at which the ratio reaches the threshold, at least 1, between whole steps.

        None where nothing has been observed; infinite where it won't be reached.
        """
        observed = {
            age: ratio
            for age in range(1, self.interval + 1)
            if (ratio := self.ratio(age)) is not None
        }
        if not observed:
            return None
        below = 0
        for age, ratio in observed.items():
            if ratio >= self.threshold:
                return self._between(below, age, observed) if below else float(age)
            below = age
        return self._beyond(below, observed)

    def _between(self, below: int, above: int, observed: Mapping[int, float]) -> float:
        """Return the n between two observed ages, by a power of n."""
        low, high = observed[below], observed[above]
        if low == 0 or math.isinf(high):
            return float(above)
        share = math.log(self.threshold / low) / math.log(high / low)
        return below * math.exp(share * math.log(above / below))

    def _beyond(self, oldest: int, observed: Mapping[int, float]) -> float:
        """Return the n beyond all observed ages, by a power of n."""
        first, last = observed.get(1, 0.0), observed[oldest]
        if last == 0:
            return math.inf
        # Age 1 alone tells nothing of growth: as fast as can be gives the shortest window.
        exponent = 1.0
        if oldest > 1 and first > 0:
            exponent = math.log(last / first) / math.log(oldest)
        if exponent <= 0:
            return math.inf
        log_n = math.log(oldest) + math.log(self.threshold / last) / exponent
        return math.exp(log_n) if log_n < _LOG_MOST else math.inf

    def _decide(self) -> None:
        """Go to the wanted S once it has been off for a whole window."""
        n = self.wanted()
        direction = 0
        if n is not None and abs(n - self.interval) > self.hysteresis * self.interval:
            direction = (_whole(n) > self.interval) - (_whole(n) < self.interval)
        if n is None or not direction:
            self._streak = 0
            return
        self._streak = direction if self._streak * direction < 0 else self._streak + direction
        if abs(self._streak) >= self.interval:
            self._move(min(_whole(n), 2 * self.interval))

    def _move(self, interval: int) -> None:
        """Set S to the nearest value within the bounds."""
        interval = min(max(interval, self.least), self.largest)
        if interval != self.interval:
            self.interval, self._streak = interval, 0

    def state_dict(self) -> dict[str, Any]:
        """Return all observations and decisions, JSON-ready."""
        return {
            "interval": self.interval,
            "bounds": [self.least, self.largest],
            "streak": self._streak,
            "sums": [[age, *sums] for age, sums in self._sums.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that ``state_dict`` returned.

        Raises:
            CheckpointError: The state isn't one of ``ZenAuto``.
        """
        names = list(self.state_dict())
        if sorted(state) != sorted(names):
            raise CheckpointError(
                f"a state of ZenAuto has {', '.join(names)}, but the checkpoint's has "
                f"{', '.join(state) or 'nothing'}: resume with the controller that was saved"
            )
        self.least, self.largest = (int(bound) for bound in state["bounds"])
        self.interval, self._streak = int(state["interval"]), int(state["streak"])
        self._sums = {
            int(age): (float(accumulated), float(important))
            for age, accumulated, important in state["sums"]
        }


def _whole(n: float) -> int:
    """Return the smallest whole number of steps that is not below n, but for rounding."""
    return math.ceil(min(n, math.exp(_LOG_MOST)) - 1e-6)
