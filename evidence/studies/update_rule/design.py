"""Runs of the update rule's ablation: one setting at a time around the preset.

Every setting is changed alone around the preset ``zenflow``. The published rule and the delayed
update stand beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from evidence.studies.regimes import FINE_TUNING, SCRATCH

CENTRE = "zenflow"
PUBLISHED = "zenflow_paper"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A rule: a preset and what is changed in it."""

    name: str
    strategy: str = CENTRE
    knobs: Mapping[str, Any] = field(default_factory=dict)


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
        _changed("S = 8", update_interval=8),
        _changed("k = 0.02", topk_ratio=0.02),
        _changed("k = 0.3", topk_ratio=0.3),
        _changed("S = 2", update_interval=2),
    )
}
"""Rules by name, the most telling first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One regime at one learning rate, with its variants, the most telling first."""

    regime: str
    lr: float
    variants: tuple[str, ...] = tuple(VARIANTS)


GROUPS: tuple[Group, ...] = (
    Group(regime=SCRATCH, lr=1e-3),
    Group(regime=FINE_TUNING, lr=3e-4),
)
"""Groups in the order in which they are run. The study of accuracy has other learning rates."""
