"""Findings: a published claim, our number, and whether the claim holds."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Basis = Literal["measured", "emulated", "simulated"]
BASES: tuple[Basis, ...] = ("measured", "emulated", "simulated")
"""Kinds of our numbers, the one that decides first."""


class Verdict(enum.Enum):
    """Whether a claim holds here."""

    HOLDS = "holds"
    FAILS = "does not hold"
    UNKNOWN = "unknown"

    @property
    def plural(self) -> str:
        """Verdict of several claims, as a verb in the plural."""
        return {"holds": "hold", "does not hold": "do not hold"}.get(self.value, self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """A published range, both ends included."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise ValueError(f"a range needs low <= high, got {self.low:g} and {self.high:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Largest distance from the published number that still counts as equal."""

    kind: Literal["relative", "absolute", "at least", "at most"]
    amount: float = 0.0
    """Share of the published number; of kind absolute in its unit."""

    def __post_init__(self) -> None:
        if not 0 <= self.amount < math.inf:
            raise ValueError(f"a tolerance must be finite and at least 0, got {self.amount:g}")

    @classmethod
    def relative(cls, amount: float) -> Tolerance:
        """Return the tolerance of a share of the published number, either way."""
        return cls(kind="relative", amount=amount)

    @classmethod
    def absolute(cls, amount: float) -> Tolerance:
        """Return the tolerance of a distance, either way."""
        return cls(kind="absolute", amount=amount)

    @classmethod
    def at_least(cls, slack: float = 0.0) -> Tolerance:
        """The published number or more, or less by a share ``slack`` of it."""
        return cls(kind="at least", amount=slack)

    @classmethod
    def at_most(cls, slack: float = 0.0) -> Tolerance:
        """The published number or less, or more by a share ``slack`` of it."""
        return cls(kind="at most", amount=slack)

    def allows(self, value: float, published: Range) -> bool:
        """Return whether a value counts as the published one."""
        low, high = published.low, published.high
        if self.kind == "absolute":
            return low - self.amount <= value <= high + self.amount
        lowest, highest = low - self.amount * abs(low), high + self.amount * abs(high)
        if self.kind == "at least":
            return value >= lowest
        if self.kind == "at most":
            return value <= highest
        return lowest <= value <= highest

    def __str__(self) -> str:
        if self.kind in ("at least", "at most"):
            return self.kind + (f", {self.amount:.0%} slack" if self.amount else "")
        shown = f"{100 * self.amount:g}%" if self.kind == "relative" else f"{self.amount:g}"
        return f"within {shown}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One claim of a publication with the numbers that decide it."""

    claim: str
    source: str
    """Place where the published number is found."""
    unit: str
    """Unit of every number here; empty where there is none."""
    tolerance: Tolerance
    published: Range | float | None = None
    simulated: float | None = None
    """Predicted, or computed by a closed form, for the publication's hardware unless the note says
    otherwise."""
    emulated: float | None = None
    """Number that the real engine gave over a link emulated on a CPU."""
    measured: float | None = None
    """Number that the real engine gave with nothing emulated, or that was counted."""
    note: str = ""

    @property
    def basis(self) -> Basis | None:
        """Kind of our number that decides: measured before emulated before simulated."""
        return next((name for name in BASES if getattr(self, name) is not None), None)

    @property
    def ours(self) -> float | None:
        """The number that decides."""
        return None if self.basis is None else float(getattr(self, self.basis))

    @property
    def verdict(self) -> Verdict:
        """Whether the claim holds; unknown where either number is missing or not a number."""
        ours, published = self.ours, self.published
        if published is None or ours is None or math.isnan(ours):
            return Verdict.UNKNOWN
        if not isinstance(published, Range):
            published = Range(low=published, high=published)
        return Verdict.HOLDS if self.tolerance.allows(ours, published) else Verdict.FAILS

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, JSON-ready, and the verdict."""
        published: Any = self.published
        if isinstance(published, Range):
            published = [published.low, published.high]
        return {
            "claim": self.claim,
            "source": self.source,
            "published": published,
            **{basis: getattr(self, basis) for basis in BASES},
            "unit": self.unit,
            "tolerance": {"kind": self.tolerance.kind, "amount": self.tolerance.amount},
            "note": self.note,
            "verdict": self.verdict.value,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Finding:
        """Return the finding that `to_dict` wrote; the verdict is computed, not read."""
        given = {name: value for name, value in values.items() if name != "verdict"}
        given["tolerance"] = Tolerance(**given["tolerance"])
        if isinstance(given["published"], list):
            low, high = given["published"]
            given["published"] = Range(low=low, high=high)
        return cls(**given)


def aim(claim: str, bound: float, tolerance: Tolerance, *, unit: str = "", **ours: Any) -> Finding:
    """Return whether an aim of this project is met.

    Args:
        claim: What the aim is.
        bound: Number that is aimed at.
        tolerance: Which side of it is meant.
        unit: Unit of both numbers.
        ours: Number that was found, by its basis: measured, emulated or simulated.
    """
    return Finding(
        claim=claim, source="the aim of this project, set beforehand", unit=unit, published=bound,
        tolerance=tolerance, **ours,
    )  # fmt: skip
