"""Settings of a tuned run: who chooses knobs, which knobs, and within which bounds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from experiments.training.settings.field import Rule, Setting, at_least, setting, settings_of

_ALL = ("topk_ratio", "update_interval", "select_strategy", "select_interval")
CHOSEN_KNOBS: Mapping[str, tuple[str, ...]] = {
    "twin": _ALL,
    "zen-auto": ("update_interval",),
    "both": _ALL,
}
"""Knobs that each controller chooses; ``both`` is the twin, bounded by zen-auto's intervals."""

_TUNABLE = ("zenflow", "zenflow_paper")
_BYTES = Rule(
    "must be a positive number of bytes", lambda value: math.isfinite(value) and value > 0
)
_SHARE = Rule("is a share of energy, in (0, 1)", lambda value: 0 < value < 1)
_STALENESS = Rule(
    "must be at least 2 steps", at_least(2).holds, "a window of one step lands a step later"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningSettings:
    """Who chooses knobs while a run goes on; a None is no bound."""

    controller: str | None = setting(None, choices=tuple(CHOSEN_KNOBS))
    """Who chooses knobs while the run goes on: the simulator's twin of the run, zen-auto (S
    alone), or both."""
    device_memory: float | None = setting(None, rule=_BYTES, unit=1e9, bounds=("topk_ratio",))
    """Most GB of one device, with --auto."""
    host_memory: float | None = setting(None, rule=_BYTES, unit=1e9, bounds=("topk_ratio",))
    """Most GB of the host, with --auto."""
    largest_staleness: int | None = setting(None, rule=_STALENESS, bounds=("update_interval",))
    """Most steps from a gradient to its landing, with --auto."""
    smallest_captured: float | None = setting(None, rule=_SHARE, bounds=("topk_ratio",))
    """Least share of energy in important columns, with --auto."""
    profile: str | None = setting(None)
    """File of zenflow calibrate that --auto starts from."""
    hardware: str | None = setting(None)
    """Machine of the simulator's table that --auto starts from."""
    replay: str | None = None
    """Decisions file of the tuned run that this one repeats."""


def tuning_errors(
    settings: TuningSettings, strategy: str, knobs: Mapping[str, Any]
) -> Iterator[str]:
    """Yield conflicts between the controller and the rest of a run."""
    name = settings.controller
    if name not in ("twin", "both"):
        for key in (*(bound.name for bound in _bounds()), "profile", "hardware"):
            if getattr(settings, key) is not None:
                yield f"{key} is for the twin: add --auto, or leave it out"
    if settings.profile is not None and settings.hardware is not None:
        yield (
            "profile and hardware both say what the machine is: give the profile alone, which was "
            "measured on it"
        )
    if name is not None and strategy not in _TUNABLE:
        yield (
            f"controller {name!r} tunes {' and '.join(_TUNABLE)}, but strategy is {strategy!r}, "
            "which has nothing to choose: leave one of the two out"
        )
    for knob in CHOSEN_KNOBS.get(str(name), ()):
        if knob in knobs:
            yield (
                f"{knob} is what controller {name!r} chooses, but is given as {knobs[knob]!r}: "
                f"leave it out{_other_way(name, knob)}"
            )


def _other_way(controller: str | None, knob: str) -> str:
    flags = [f"--{bound.name.replace('_', '-')}" for bound in _bounds() if knob in bound.bounds]
    if controller == "zen-auto" or not flags:
        return ""
    return f", or bound it with {', '.join(flags)}"


def _bounds() -> list[Setting]:
    return [found for found in settings_of(TuningSettings).values() if found.bounds]
