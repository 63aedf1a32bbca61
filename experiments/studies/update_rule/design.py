"""Which runs the ablation of the update rule has: one knob at a time, a ladder, interactions.

The full product of eight knobs would be tens of thousands of runs. So every knob is changed alone
around the preset ``zenflow``; the published rule is turned into it one knob after another; and
where two knobs are known to act on each other both are changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CENTRE = "zenflow"
PUBLISHED = "zenflow_paper"
WARM_UP_SHARE = 0.2
"""Share of a run's steps in which a warmed-up variant defers nothing: twice the rate's rise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A rule: a preset, what is changed in it, and what the study adds to the engine."""

    name: str
    strategy: str = CENTRE
    knobs: Mapping[str, Any] = field(default_factory=dict)
    clip: float | None = None
    """Bound of ``step_clip``; None is no clipping."""
    warms_up: bool = False
    changed: str = ""
    """The one knob that differs from the centre's; empty of others."""

    def knobs_over(self, steps: int) -> dict[str, Any]:
        """Return the changed fields of ``ZenFlowConfig`` in a run of so many steps."""
        warm = {"full_warm_up_rounds": round(WARM_UP_SHARE * steps)} if self.warms_up else {}
        return {**self.knobs, **warm}


def _one(knob: str, value: Any, text: str = "", **others: Any) -> Variant:
    return Variant(name=text or f"{knob} = {value}", knobs={knob: value, **others}, changed=knob)


WINDOW = {"deferred_moments": "window"}

ONE_KNOB: tuple[Variant, ...] = (
    _one("deferred_lr_scale", "none"),
    _one("deferred_lr_scale", "sqrt"),
    _one("lag", 2),
    _one("lag", 4),
    _one("overlap_step", False, "no overlap", lag=None, prediction=0.0),
    _one("rolling", False, "aligned windows"),
    _one("prediction", 0.0),
    _one("prediction", 0.5),
    _one("deferred_moments", "window"),
    _one("update_interval", 2, "S = 2"),
    _one("update_interval", 8, "S = 8"),
    _one("update_interval", 16, "S = 16"),
    _one("topk_ratio", 0.0, "k = 0"),
    _one("topk_ratio", 0.02, "k = 0.02"),
    _one("topk_ratio", 0.3, "k = 0.3"),
    Variant(name="host steps clipped at 0.25", clip=0.25, changed="step clip"),
    Variant(name="warm-up", warms_up=True, changed="full_warm_up_rounds"),
)

_TO_CENTRE: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("+ linear lr", {"deferred_lr_scale": "linear"}),
    ("+ lag 1", {"lag": 1}),
    ("+ rolling", {"rolling": True}),
)
"""Changes of the published rule, one on top of another. With prediction on top it is the centre
with window moments, and with step moments too it is the centre."""


def _ladder() -> tuple[Variant, ...]:
    knobs: dict[str, Any] = {}
    rungs = [Variant(name=PUBLISHED, strategy=PUBLISHED)]
    for name, change in _TO_CENTRE:
        knobs = {**knobs, **change}
        rungs.append(Variant(name=f"published {name}", strategy=PUBLISHED, knobs=knobs))
    return tuple(rungs)


LADDER = _ladder()
LADDER_NAMES = (*(v.name for v in LADDER), "deferred_moments = window", CENTRE)
LADDER_TEXTS = (
    "published rule", *(name for name, _ in _TO_CENTRE), "+ prediction", "+ step moments",
)  # fmt: skip

TOGETHER: tuple[Variant, ...] = (
    Variant(name="warm-up, window moments", knobs=WINDOW, warms_up=True),
    Variant(name="S = 16, sqrt lr", knobs={"update_interval": 16, "deferred_lr_scale": "sqrt"}),
    Variant(name="S = 16, steps clipped at 0.25", knobs={"update_interval": 16}, clip=0.25),
    Variant(name="delayed", strategy="delayed"),
    Variant(name="delayed + prediction", strategy="delayed", knobs={"prediction": 1.0}),
)

VARIANTS: Mapping[str, Variant] = {
    v.name: v for v in (Variant(name=CENTRE), *LADDER, *ONE_KNOB, *TOGETHER)
}

_SCRATCH = (
    CENTRE, *(v.name for v in LADDER), "deferred_moments = window", "warm-up",
    "warm-up, window moments", "deferred_lr_scale = none", "prediction = 0.0", "aligned windows",
    "lag = 4", "no overlap", "host steps clipped at 0.25", "deferred_lr_scale = sqrt", "S = 8",
    "k = 0.3",
)  # fmt: skip
"""Variants trained from scratch, which takes longest: what says least is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One regime at one learning rate, with its variants, the most telling first."""

    regime: str
    lr: float
    variants: tuple[str, ...]


GROUPS: tuple[Group, ...] = (
    Group(regime="fine-tuning", lr=1e-3, variants=tuple(VARIANTS)),
    Group(regime="from scratch", lr=1e-3, variants=_SCRATCH),
    Group(
        regime="fine-tuning",
        lr=3e-4,
        variants=(
            CENTRE, PUBLISHED, "deferred_moments = window", "deferred_lr_scale = none",
            "prediction = 0.0", "S = 16",
        ),
    ),
    Group(
        regime="from scratch",
        lr=4e-4,
        variants=(CENTRE, PUBLISHED, "deferred_moments = window", "warm-up, window moments"),
    ),
)  # fmt: skip
"""Groups in the order in which they are run."""
