"""Refit: the twin's constants from measured spans, robust against outliers, old news fading.

A part's constant scales that part's time. So the ratio of measured to predicted busy seconds is
nearly all that moves it: two or three fixed-point steps find all constants, with one simulation of
each measured setting and step. A constant is the mode of a Student-t likelihood about its prior.

Where a GPU waits for the host's launches, these take a step without its stalls, and the device's
own work less than its spans. Otherwise launches take less than the step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autotune.model.stretch import Stretch
from autotune.model.twin import PARTS, Constants, Twin

_STEPS = 3
_CLOSE = 0.005
"""Change of a constant's logarithm that is not worth another step: a sixth of `_PART_NOISE`."""
_SETTINGS = 3
"""Number of measured settings that count, the most recent ones."""
_LEAST_SHARE = 0.02
"""Share of a step below which a part's work says nothing reliable."""
_PART_NOISE = 0.03
"""Relative spread of a part's busy seconds from stretch to stretch."""
_DEGREES = 3.0
"""Degrees of freedom of the Student t: an outlier of 10 sigma hardly counts."""
_MEMORY = 8.0
"""Number of stretches after which one counts by 1/e."""
_BOUND = math.log(30.0)


@dataclass(frozen=True, slots=True)
class Prior:
    """Belief about the constants before anything is measured: a log-normal. See `refit`."""

    centre: Constants
    """Most probable value of each constant."""
    sigma: float
    """Standard deviation of the constants' logarithms: 0.35 for a table entry, 0.1 after
    calibration."""


def refit(twin: Twin, stretches: Sequence[Stretch], prior: Prior) -> dict[str, float]:
    """Return the constants with which the twin reproduces the measured stretches best.

    Args:
        twin: Predicts busy seconds.
        stretches: In order; those without busy seconds say nothing.
        prior: Where there is no evidence, its centre stands.

    Examples:
        Copies to the host take twice as long as predicted. The factor on the link's rate is a bit
        more, since the fixed seconds of a copy stay.

        >>> from autotune.model.twin import NEUTRAL
        >>> from sim.hardware.catalog import find_machine
        >>> from sim.models.table import find_model
        >>> from sim.models.workload import Workload
        >>> from zenflow.config import ZenFlowConfig
        >>> from zenflow.knobs import Knobs
        >>> workload = Workload.of_config(*find_model("gpt2"))
        >>> twin = Twin(workload, find_machine("hgx-h100", 1), ZenFlowConfig())
        >>> knobs = Knobs.of(twin.config)
        >>> busy = dict(twin.forecast(knobs).busy_seconds)
        >>> busy["d2h"] *= 2
        >>> seen = Stretch(index=0, last_step=20, knobs=knobs, step_seconds=0.1, noise=0.01,
        ...                stall_seconds=0.0, rho=0.8, busy_seconds=busy)
        >>> round(refit(twin, [seen], Prior(NEUTRAL, sigma=0.35))["d2h"], 1)
        2.2
    """
    evidence = _recent([s for s in stretches if s.busy_seconds])
    centre = {part: math.log(prior.centre[part]) for part in PARTS}
    found = centre
    for _ in range(_STEPS):
        former = found
        constants = {part: math.exp(value) for part, value in former.items()}
        ratios = _log_ratios(twin, evidence, constants)
        found = {}
        for part in PARTS:
            wanted = [(former[part] + ratio, weight) for ratio, weight in ratios[part]]
            moved = _mode(wanted, centre[part], prior.sigma)
            found[part] = min(centre[part] + _BOUND, max(centre[part] - _BOUND, moved))
        if max(abs(found[part] - former[part]) for part in PARTS) < _CLOSE:
            break
    return {part: math.exp(value) for part, value in found.items()}


def _recent(stretches: Sequence[Stretch]) -> list[Stretch]:
    """Return the stretches of the settings measured last, in order."""
    settings = list(dict.fromkeys(stretch.knobs for stretch in reversed(stretches)))
    return [stretch for stretch in stretches if stretch.knobs in settings[:_SETTINGS]]


def _log_ratios(
    twin: Twin, evidence: Sequence[Stretch], constants: Constants
) -> Mapping[str, list[tuple[float, float]]]:
    """Return by part the log of measured over predicted busy seconds and its weight, of each.

    A bound that holds agrees with any constant, the former one.
    """
    found: dict[str, list[tuple[float, float]]] = {part: [] for part in PARTS}
    for stretch in evidence:
        predicted = twin.forecast(stretch.knobs, constants).busy_seconds
        floor = _LEAST_SHARE * stretch.step_seconds
        weight = math.exp(-(evidence[-1].index - stretch.index) / _MEMORY)
        for part in PARTS:
            measured = stretch.measured(part)
            if measured > floor and predicted.get(part, 0.0) > 0:
                ratio = math.log(measured / predicted[part])
                if part in stretch.bounded:
                    ratio = min(0.0, ratio)
                found[part].append((ratio, weight))
    return found


def _mode(wanted: Sequence[tuple[float, float]], centre: float, sigma: float) -> float:
    """Return the most probable value: Gaussian about ``centre``, Student t about each wanted one.

    Each wanted one is a (value, weight).
    """
    if not wanted:
        return centre
    at = _median(wanted)  # far from it pieces hardly count, so that it must be where most are
    for _ in range(20):  # iteratively reweighted least squares
        total = centre / sigma**2
        weights = 1.0 / sigma**2
        for value, weight in wanted:
            scaled = ((value - at) / _PART_NOISE) ** 2
            precision = weight * (_DEGREES + 1) / (_DEGREES + scaled) / _PART_NOISE**2
            total += precision * value
            weights += precision
        moved = total / weights
        if abs(moved - at) < 1e-9:
            break
        at = moved
    return at


def _median(wanted: Sequence[tuple[float, float]]) -> float:
    """Return the value below and above which evidence weighs the same."""
    rest = sum(weight for _, weight in wanted) / 2
    for value, weight in sorted(wanted):
        rest -= weight
        if rest <= 0:
            return value
    return max(wanted)[0]
