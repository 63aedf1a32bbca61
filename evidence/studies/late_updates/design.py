"""Runs that compare the rules for late updates: the most telling first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from evidence.studies.late_updates.rules import Rule
from evidence.studies.regimes import SCRATCH

ADAMW = "AdamW"
_KINDS = {
    rule.name: rule
    for rule in (
        Rule(name="fresh gradient", fresh="factored"),
        Rule(name="fresh gradient, no delay", fresh="factored", delay_share=0.0),
        Rule(name="fresh gradient, v by columns", bound=1.0),
        Rule(name="no fresh gradient", fresh="none"),
        Rule(name="former rule", kind="former"),
    )
}
FRESH, NO_DELAY, COLUMN, NO_FRESH, FORMER = _KINDS


def rule_of(name: str, interval: int) -> Rule | None:
    """Return a rule by its name, with windows of so many steps; None for AdamW."""
    if name == ADAMW:
        return None
    return replace(_KINDS[name], interval=interval)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One regime at one learning rate, with its rules and their windows."""

    regime: str
    """Kind of training, such as fine-tuning."""
    lr: float
    """Peak learning rate of AdamW."""
    rules: Sequence[tuple[str, int]]
    """Name of each rule and its S."""


GROUPS: Sequence[Group] = (
    Group(
        regime=SCRATCH,
        lr=1e-3,
        rules=(
            (FRESH, 4), (FRESH, 16), (NO_FRESH, 4), (FRESH, 64), (NO_DELAY, 4), (NO_DELAY, 16),
            (NO_DELAY, 64), (COLUMN, 16), (COLUMN, 64), (FORMER, 4),
        ),
    ),
    Group(regime=SCRATCH, lr=2e-3, rules=((FRESH, 4), (FRESH, 16), (NO_DELAY, 4), (NO_DELAY, 16))),
    Group(regime=SCRATCH, lr=4e-4, rules=((FRESH, 16), (NO_DELAY, 16))),
)  # fmt: skip
"""Groups in the order in which they are run."""
SMOKE: Sequence[Group] = (Group(regime=SCRATCH, lr=1e-3, rules=((FRESH, 4), (NO_FRESH, 4))),)
