"""Which runs compare the rules for late updates: the most telling first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from experiments.studies.late_updates.rules import Rule
from experiments.studies.regimes import FINE_TUNING, SCRATCH

ADAMW = "AdamW"
_FRESH = Rule(name="fresh gradient, column v, bounded", bound=1.0)
_KINDS = {
    rule.name: rule
    for rule in (
        _FRESH,
        Rule(name="fresh gradient, column v"),
        Rule(name="exact host, no fresh gradient", fresh="none"),
        Rule(name="former rule", kind="former"),
        Rule(name="published rule", kind="published", rolling=False),
    )
}
BOUNDED, COLUMN, NO_FRESH, FORMER, PUBLISHED = _KINDS


def rule_of(name: str, interval: int) -> Rule | None:
    """Return a rule by its name, with windows of so many steps; None for AdamW."""
    if name == ADAMW:
        return None
    rule = replace(_KINDS[name], interval=interval)
    return replace(rule, lag=interval) if name == PUBLISHED else rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One regime at one learning rate, with its rules and their windows."""

    regime: str
    """Kind of training."""
    lr: float
    """Peak learning rate."""
    rules: Sequence[tuple[str, int]]
    """Name of each rule and its S."""


GROUPS: Sequence[Group] = (
    Group(
        regime=SCRATCH,
        lr=1e-3,
        rules=(
            *((BOUNDED, interval) for interval in (4, 16, 64)), (FORMER, 4), (NO_FRESH, 4),
            (COLUMN, 16), (COLUMN, 64), (PUBLISHED, 4),
        ),
    ),
    Group(regime=SCRATCH, lr=2e-3, rules=((BOUNDED, 4), (BOUNDED, 16))),
    Group(regime=SCRATCH, lr=4e-4, rules=((BOUNDED, 16),)),
    Group(regime=FINE_TUNING, lr=1e-3, rules=((BOUNDED, 16),)),
)  # fmt: skip
"""Groups in the order in which they are run."""
SMOKE: Sequence[Group] = (Group(regime=SCRATCH, lr=1e-3, rules=((BOUNDED, 4), (PUBLISHED, 4))),)
