"""What a tuned run may be asked for: controllers, the knobs each chooses, bounds. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from experiments.training.settings import TrainSettings

_ALL = (
    "topk_ratio", "update_interval", "lag", "rolling", "select_strategy", "select_interval",
)  # fmt: skip
CHOSEN_KNOBS: Mapping[str, tuple[str, ...]] = {
    "twin": _ALL,
    "zen-auto": ("update_interval",),
    "both": _ALL,
}
"""Controllers by name, and the knobs that each chooses: ``both`` is the twin with the intervals
of zen-auto as its bounds."""

CONTROLLERS = tuple(CHOSEN_KNOBS)

BOUNDS: Mapping[str, tuple[str, ...]] = {
    "device_memory": ("topk_ratio",),
    "host_memory": ("topk_ratio",),
    "largest_staleness": ("update_interval", "lag"),
    "smallest_captured": ("topk_ratio",),
}
"""Settings that bound what the twin may choose, and the knobs they bound most directly."""

MACHINE = ("profile", "hardware")
"""Settings that say what machine the twin starts from."""

_TUNABLE = ("zenflow", "zenflow_paper")


def tuning_errors(settings: TrainSettings) -> list[str]:
    """Return what is wrong with the part of the settings that says how a run is tuned."""
    name = settings.controller
    if name is not None and name not in CONTROLLERS:
        return [f"controller must be one of {', '.join(CONTROLLERS)}, but is {name!r}"]
    broken = [*_number_errors(settings), *_twin_errors(settings)]
    if name is None:
        return broken
    if settings.strategy not in _TUNABLE:
        broken.append(
            f"controller {name!r} tunes {' and '.join(_TUNABLE)}, but strategy is "
            f"{settings.strategy!r}, which has nothing to choose: leave one of the two out"
        )
    for knob in CHOSEN_KNOBS[name]:
        if knob in settings.knobs:
            broken.append(
                f"{knob} is what controller {name!r} chooses, but is given as "
                f"{settings.knobs[knob]!r}: leave it out{_other_way(name, knob)}"
            )
    return broken


def _twin_errors(settings: TrainSettings) -> list[str]:
    """Return bounds and machines that nobody would look at."""
    broken = []
    if settings.controller not in ("twin", "both"):
        given = [key for key in (*BOUNDS, *MACHINE) if getattr(settings, key) is not None]
        broken = [f"{key} is for the twin: add --auto, or leave it out" for key in given]
    if settings.profile is not None and settings.hardware is not None:
        broken.append(
            "profile and hardware both say what the machine is: give the profile alone, which was "
            "measured on it"
        )
    return broken


def _number_errors(settings: TrainSettings) -> list[str]:
    broken = [
        f"{name} must be a positive number of bytes, but is {value}"
        for name in ("device_memory", "host_memory")
        if (value := getattr(settings, name)) is not None
        and not (math.isfinite(value) and value > 0)
    ]
    steps, share = settings.largest_staleness, settings.smallest_captured
    if steps is not None and steps < 2:
        broken.append(
            f"largest_staleness must be at least 2 steps, but is {steps}: a window of one step "
            "lands a step later"
        )
    if share is not None and not 0 < share < 1:
        broken.append(f"smallest_captured is a share of energy, in (0, 1), but is {share}")
    return broken


def _other_way(controller: str, knob: str) -> str:
    bounds = [name for name, bounded in BOUNDS.items() if knob in bounded]
    if controller == "zen-auto" or not bounds:
        return ""
    flags = ", ".join(f"--{name.replace('_', '-')}" for name in bounds)
    return f", or bound it with {flags}"
