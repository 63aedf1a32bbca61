"""Which runs the ablation of the update rule has: one setting at a time around the preset.

Every setting is changed alone around the preset ``zenflow``. The published rule and the delayed
update stand beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from experiments.studies.regimes import FINE_TUNING, SCRATCH

CENTRE = "zenflow"
PUBLISHED = "zenflow_paper"
WARM_UP_SHARE = 0.2
"""Share of a run's steps in which a warmed-up variant defers nothing: twice the rate's rise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A rule: a preset and what is changed in it."""

    name: str
    strategy: str = CENTRE
    knobs: Mapping[str, Any] = field(default_factory=dict)
    warms_up: bool = False

    def knobs_over(self, steps: int) -> dict[str, Any]:
        """Return the changed fields of ``ZenFlowConfig`` in a run of so many steps."""
        warm = {"full_warm_up_rounds": round(WARM_UP_SHARE * steps)} if self.warms_up else {}
        return {**self.knobs, **warm}


def _changed(name: str, **knobs: Any) -> Variant:
    return Variant(name=name, knobs=knobs)


VARIANTS: Mapping[str, Variant] = {
    v.name: v
    for v in (
        Variant(name=CENTRE),
        Variant(name=PUBLISHED, strategy=PUBLISHED),
        _changed("S = 16", update_interval=16),
        _changed("S = 32", update_interval=32),
        _changed("k = 0", topk_ratio=0.0),
        _changed("S = 1", update_interval=1),
        _changed("no overlap", overlap_step=False),
        Variant(name="delayed", strategy="delayed"),
        Variant(name="warm-up", warms_up=True),
        _changed("S = 8", update_interval=8),
        _changed("k = 0.02", topk_ratio=0.02),
        _changed("k = 0.3", topk_ratio=0.3),
        _changed("S = 2", update_interval=2),
    )
}
"""Rules by name, the most telling first."""

FEW = 8
"""Number of them at learning rates other than AdamW's best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One regime at one learning rate, with its variants, the most telling first."""

    regime: str
    lr: float
    variants: tuple[str, ...] = tuple(VARIANTS)[:FEW]


GROUPS: tuple[Group, ...] = (
    Group(regime=SCRATCH, lr=1e-3, variants=tuple(VARIANTS)),
    Group(regime=FINE_TUNING, lr=3e-4, variants=tuple(VARIANTS)),
    Group(regime=SCRATCH, lr=2e-3),
    Group(regime=FINE_TUNING, lr=1e-3),
    Group(regime=SCRATCH, lr=4e-4),
    Group(regime=SCRATCH, lr=2e-4),
    Group(regime=FINE_TUNING, lr=1e-4),
)
"""Groups in the order in which they are run."""
