"""Drift: signs in a measured stretch that the machine is no more what it was."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from autotune.model.stretch import Stretch
from autotune.model.twin import PARTS
from autotune.online.shift_watch import LEAST_SHIFT

_SIGMAS = 4.0
_OTHER_LANE, _LEAST_LANE = math.log(2.0), 0.05
"""Change of the logarithm of a lane's work that needs no second stretch to be believed, and share
of a step below which the work says nothing."""


def has_shifted(stretch: Stretch) -> bool:
    """Whether steps changed at once before a stretch, and stayed changed in it."""
    if stretch.before_shift is None:
        return False
    change = math.log(stretch.step_seconds / stretch.before_shift)
    return abs(change) > max(LEAST_SHIFT, _SIGMAS * stretch.noise)


def is_other_machine(stretch: Stretch, known: Mapping[str, float]) -> bool:
    """Whether a lane's work takes another time than is known of these knobs, by a lot."""
    least = _LEAST_LANE * stretch.step_seconds
    pairs = [(stretch.measured(p), known[p]) for p in known if p not in stretch.bounded]
    return any(
        min(pair) > 0 and max(pair) > least and abs(math.log(pair[0] / pair[1])) > _OTHER_LANE
        for pair in pairs
    )


def mean_busy(stretches: Sequence[Stretch]) -> Mapping[str, float]:
    """Return the seconds of work of each part, per step, as far as it was looked at."""
    seen = [s.busy_seconds for s in stretches if s.busy_seconds]
    return {part: fmean(busy.get(part, 0.0) for busy in seen) for part in PARTS} if seen else {}
