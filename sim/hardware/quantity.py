"""Quantity: one number of a machine in SI units, the kind of its source, and its range."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from zenflow.errors import ConfigError

Kind = Literal["spec", "measured", "estimated"]
KINDS: tuple[str, ...] = get_args(Kind)

DEFAULT_SIGMA: Mapping[str, float] = {"spec": 0.05, "measured": 0.03, "estimated": 0.25}
"""Relative standard deviation of a quantity whose source states none."""

RANGES: Mapping[str, tuple[float, float]] = {
    "link.duplex": (0.0, 1.0),
    "link.pageable": (0.0, 1.0),
    "host.numa_hop": (0.0, 1.0),
    "device.matmul_efficiency": (0.0, 1.25),
    "device.float32_efficiency": (0.0, 1.0),
    "device.sustained_share": (0.0, 1.0),
    "device.attention_efficiency": (0.0, 1.0),
    "device.attention_backward_efficiency": (0.0, 1.0),
    "device.native_attention_efficiency": (0.0, 1.0),
    "device.native_attention_backward_efficiency": (0.0, 1.0),
    "device.bandwidth_efficiency": (0.0, 1.0),
    "device.collective_share": (0.0, 1.0),
    "host.core_sharing": (1.0, 2.0),
    "host.adam_share": (0.0, 1.0),
}
"""Least and largest value of quantities that are bounded; none may be 0."""


def bounded(name: str, value: float) -> float:
    """Return the value nearest to this one that the quantity of this name may have."""
    low, high = RANGES.get(name, (0.0, math.inf))
    return min(high, max(low, value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """One number of a profile, with its kind and source.

    Raises:
        ConfigError: The value is not a positive finite number, or the kind is none of `KINDS`.

    Examples:
        >>> link = Quantity(value=25e9, kind="measured", source="zenflow calibrate")
        >>> link.value, link.uncertainty
        (25000000000.0, 0.03)
    """

    value: float
    """Number in SI units."""
    kind: Kind = "estimated"
    """Kind of the source: a data sheet, a measurement or an estimate."""
    source: str = ""
    """Data sheet, page, benchmark or reasoning that the value comes from."""
    sigma: float | None = None
    """Relative standard deviation; None is `DEFAULT_SIGMA` of the kind."""

    def __post_init__(self) -> None:
        """Check the rules of every quantity."""
        if not (isinstance(self.value, int | float) and math.isfinite(self.value)):
            raise ConfigError(f"a quantity must be a finite number, got {self.value!r}")
        if not self.value > 0:
            raise ConfigError(
                f"a quantity must be positive, got {self.value}: leave out what a machine lacks"
            )
        if self.kind not in KINDS:
            raise ConfigError(
                f"a quantity's kind must be one of {', '.join(KINDS)}, got {self.kind!r}"
            )

    @property
    def uncertainty(self) -> float:
        """Relative standard deviation: ``sigma``, or the kind's default."""
        return DEFAULT_SIGMA[self.kind] if self.sigma is None else self.sigma
