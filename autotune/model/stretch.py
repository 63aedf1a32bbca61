"""Stretch: measurements over steps with one setting, the tuner's unit of evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median, median_low
from typing import Any

from zenflow.knobs import Knobs

_SPIKE = 3.0
"""Number of usual steps that a longer one counts as.

A checkpoint, a page fault or a noisy neighbour says nothing of the setting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Steps measured with one setting, queues full and selections taken out.

    See `autotune.model.refit.refit`.
    """

    index: int
    """Number of stretches of the run before this one."""
    last_step: int
    """Last step of the stretch."""
    knobs: Knobs
    """Knobs in force during the stretch."""
    step_seconds: float
    """Mean seconds of a step, robust against spikes."""
    noise: float
    """Relative standard error of ``step_seconds``."""
    stall_seconds: float
    """Mean stall of a step, seconds."""
    rho: float
    """Share of gradient energy in the deferred columns."""
    busy_seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds of work of each part of the twin, per step; empty where spans were not looked at."""
    is_starved: bool = False
    """Whether the device ran out of work in most steps, and waited for the host's launches."""
    before_shift: float | None = None
    """Seconds of a step just before, with these knobs too, where steps changed at once; else
    None."""

    @property
    def bounded(self) -> tuple[str, ...]:
        """Parts of the twin whose work took no longer than measured, and maybe less.

        Spans of a device that waits for launches hold these waits. One that does not wait hides
        the launches.
        """
        return ("device", "step") if self.is_starved else ("launch",)

    def measured(self, part: str) -> float:
        """Return the seconds of a part's work per step, or their bound; 0 where none is known.

        Launching takes no longer than a step without its stalls.
        """
        if part == "launch":
            return self.step_seconds - self.stall_seconds
        return self.busy_seconds.get(part, 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, JSON-ready."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Stretch:
        """Return the stretch that `to_dict` described."""
        return cls(**{**values, "knobs": Knobs.from_dict(values["knobs"])})


def robust_mean(seconds: Sequence[float], interval: int) -> tuple[float, float]:
    """Return the mean seconds of a step in the long run, and its relative standard error.

    Steps of one window differ where windows are aligned, so whole windows of ``interval`` steps
    are averaged, with spikes cut, and the median window counts where there are three or more.

    >>> robust_mean([1.0, 3.0, 1.0, 3.0, 1.0, 3.0], 2)
    (2.0, 0.0)
    """
    # A step that is long in every window is no spike, wherever the windows begin.
    places = range(min(interval, len(seconds)))
    limit = _SPIKE * max(median_low(seconds[place::interval]) for place in places)
    cut = [min(value, limit) for value in seconds]
    count = max(1, len(cut) // interval)
    windows = [fmean(cut[i * interval : (i + 1) * interval]) for i in range(count)]
    centre = median(windows) if count >= 3 else fmean(windows)
    if count == 1:
        return centre, _spread(cut) / len(cut) ** 0.5 / centre
    return centre, _spread(windows) / count**0.5 / centre


def _spread(values: Sequence[float]) -> float:
    """Return the standard deviation that the median absolute deviation stands for."""
    centre = median(values)
    return 1.4826 * median(abs(value - centre) for value in values)
