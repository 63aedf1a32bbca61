"""Statistical efficiency: the worth of a step that defers columns, in steps of AdamW.

Goodput is tokens per second times efficiency.

- With every gradient's own step on the host, and its share added on the device at once, short
  windows cost nothing that a training shows. From some length on they cost more and more.
- A higher learning rate makes that length shorter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from zenflow.errors import ConfigError
from zenflow.knobs import Knobs


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayCost:
    """efficiency = 1 / (1 + rho (S / interval)^power rate^rate_power), of the exact rule.

    Examples:
        Windows of 16 steps cost next to nothing, windows of 64 four per cent:

        >>> from zenflow.config import ZenFlowConfig
        >>> settings = [Knobs.of(ZenFlowConfig(update_interval=interval)) for interval in (16, 64)]
        >>> [round(FITTED.of(knobs, rho=0.8), 3) for knobs in settings]
        [0.991, 0.937]
    """

    interval: float
    """S at which a step is worth 1 / (1 + rho) at AdamW's best learning rate."""
    power: float
    """Exponent of S in the cost."""
    rate_power: float
    """Exponent of the learning rate in the cost."""

    def of(self, knobs: Knobs, rho: float, rate: float = 1.0) -> float:
        """Return the worth of a step in steps of AdamW, in (0, 1].

        Args:
            knobs: Of the step.
            rho: Share of gradient energy in the deferred columns, in [0, 1].
            rate: Learning rate over AdamW's best. Where that is not known, 1 errs to freshness:
                few train above it.

        Raises:
            ConfigError: ``rho`` is no share.
        """
        if not 0 <= rho <= 1:
            raise ConfigError(f"rho is a share of energy in [0, 1], got {rho}")
        return 1.0 / (1.0 + rho * self.cost(knobs.update_interval, rate))

    def cost(self, interval: float, rate: float = 1.0) -> float:
        """Return the further steps for each one that counts, if all energy were deferred."""
        return float((interval / self.interval) ** self.power * rate**self.rate_power)


FITTED = DelayCost(interval=359.3, power=1.435, rate_power=1.342)
"""Fit of the staleness study to a small decoder from random weights: three learning rates, eight
settings with S up to 64, three seeds.

An efficiency is off by 7.2 % (rms). Part of that is steps that are worth more than AdamW's, up to
1.09, which the formula counts as 1: with k of 0.1 and more and S up to 16 all are, at AdamW's best
rate and below it. The rest is windows of 64 steps without columns on the device, which are worth
0.77 and 0.75 at the best rate and at twice that, and by the formula 0.92 and 0.82."""


@dataclass(frozen=True, slots=True)
class EnergyCurve:
    """Share of gradient energy that the best columns hold, by the ratio of columns.

    Attributes:
        points: Ascending (ratio, share), ends (0, 0) and (1, 1) included.

    Examples:
        >>> curve = EnergyCurve.of({0.1: 0.5, 0.5: 0.9})
        >>> round(curve.captured(0.3), 2)
        0.7
    """

    points: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, measured: Mapping[float, float]) -> EnergyCurve:
        """Return the curve through measured points.

        Raises:
            ConfigError: A ratio or share lies outside [0, 1], or shares do not ascend.
        """
        points = sorted({0.0: 0.0, **measured, 1.0: 1.0}.items())
        shares = [share for _, share in points]
        is_unit = all(0 <= value <= 1 for point in points for value in point)
        if not is_unit or shares != sorted(shares):
            raise ConfigError(
                "an energy curve needs ratios and ascending shares in [0, 1], got "
                f"{dict(measured)}: give what StepReport.energy_curve has"
            )
        return cls(tuple(points))

    @classmethod
    def default(cls) -> EnergyCurve:
        """Return the curve before anything is measured: share k^0.72.

        With it a tenth of the columns holds 0.19 of the energy, which is what the small decoders
        of the records under `evidence/results` show. Larger models concentrate more, so this
        errs to the side of caution.
        """
        return cls.of({ratio: ratio**0.72 for ratio in (0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7)})

    def captured(self, topk_ratio: float) -> float:
        """Return the share that the best ``topk_ratio`` of the columns holds."""
        if not 0 <= topk_ratio <= 1:
            raise ConfigError(f"topk_ratio is a share in [0, 1], got {topk_ratio}")
        ratios, shares = zip(*self.points, strict=True)
        return float(np.interp(topk_ratio, ratios, shares))

    def through(self, topk_ratio: float, captured: float) -> EnergyCurve:
        """Return the curve bent so that it passes a measured point.

        Shares on the curve are of a moving average, and chosen by that same average: what the
        chosen columns really capture is less. The measured point says how much, on the scale of
        log odds, and the other ratios are moved as far.
        """
        if not (0 < topk_ratio < 1 and 0 < captured < 1):
            return self
        shift = _log_odds(captured) - _log_odds(self.captured(topk_ratio))
        moved, highest = {}, 0.0
        # Between two points the curve is straight before and after: the measured one is its own.
        points = {**dict(self.points), topk_ratio: self.captured(topk_ratio)}
        for ratio, share in sorted(points.items())[1:-1]:
            bent = 1.0 / (1.0 + math.exp(-_log_odds(share) - shift))
            moved[ratio] = highest = max(highest, bent)  # rounding must not make it descend
        return EnergyCurve.of(moved)


def _log_odds(share: float) -> float:
    share = min(1 - 1e-9, max(1e-9, share))
    return math.log(share / (1 - share))
