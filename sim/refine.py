"""Refine: move a profile's constants until the simulator tells what runs on the machine measured.

Probes measure parts by themselves; in a run they meet, and a constant also has to stand for what
no part has by itself (hand-overs between threads, caches that another part has used). So the
constants of the engine's parts are moved, each within reason of its probe, until simulated runs
agree with measured ones. What a device computes, and the link, are not touched. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from sim.costs import costs_of
from sim.hardware import HardwareProfile
from sim.simulate import Prediction, Strategy, simulate
from sim.workload import Workload

ENGINE_CONSTANTS = (
    "host.core_bandwidth",
    "host.core_sharing",
    "overheads.host_task",
    "overheads.copy",
    "overheads.bucket",
    "overheads.step",
    "overheads.intake_bandwidth",
    "overheads.pack_bandwidth",
    "overheads.unpack_bandwidth",
    "overheads.device_update",
)
"""What runs refine, and no others."""

_PRIOR_SIGMA = 1.0
"""Log-normal spread of a constant about its probe: a factor of e is no surprise."""
_PRIOR_WEIGHT = 1e-3
_STEPS = (0.7, 0.25, 0.1, 0.04)
"""Factors tried, as exponents, in turn."""
_SWEEPS = 3
_QUARTER = math.log(1.25)
_BOUNDS: Mapping[str, tuple[float, float]] = {"host.core_sharing": (1.0, 2.0)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One measured run in its steady state."""

    label: str
    workload: Workload
    strategy: Strategy
    step_seconds: float
    stall_seconds: float
    """Per step."""
    busy_seconds: Mapping[str, float]
    """Of each lane, per step."""
    link: tuple[float, float] | None = None
    """Bytes/s to the host and back, where a link was emulated."""


@dataclass(frozen=True, slots=True)
class Refinement:
    """A refined profile and how it came about."""

    profile: HardwareProfile
    before: float
    """Root mean square of the log errors with the probes' constants."""
    after: float
    factors: Mapping[str, float] = field(default_factory=dict)
    """Each constant over its probe's."""
    sensitivity: Mapping[str, float] = field(default_factory=dict)
    """By how much the error grows when a constant is a quarter larger or smaller, the lesser of
    the two: near 0 the runs say nothing of it, and the probe's value stands."""
    residuals: Mapping[str, float] = field(default_factory=dict)
    """Log of predicted over measured step time of each run."""


def on_link(profile: HardwareProfile, link: tuple[float, float] | None) -> HardwareProfile:
    """Return the profile with an emulated link's rates, if there is one."""
    if link is None:
        return profile
    return profile.with_values({"link.d2h": link[0], "link.h2d": link[1]})


def predict(profile: HardwareProfile, observation: Observation) -> Prediction:
    """Return what a profile predicts for an observed run."""
    costs = costs_of(observation.workload, on_link(profile, observation.link))
    return simulate(costs, observation.strategy, keeps_spans=False)


def refine(
    profile: HardwareProfile,
    observations: Sequence[Observation],
    *,
    names: Sequence[str] = ENGINE_CONSTANTS,
    on_sweep: Callable[[int, float], None] | None = None,
) -> Refinement:
    """Return the profile whose named constants tell the observed runs best.

    Coordinate descent on the constants' logarithms: a handful of constants, each of which moves
    mostly one lane, and a simulation of milliseconds.

    Args:
        profile: With the probes' constants.
        observations: Measured runs.
        names: Constants that may move, as far as the profile has them.
        on_sweep: Told after each pass over the constants: its number, and the error.
    """
    figures = profile.figures()
    names = [name for name in names if name in figures]
    probed = {name: figures[name].value for name in names}

    def moved(exponents: Mapping[str, float]) -> HardwareProfile:
        values = {name: _bounded(name, probed[name] * math.exp(exponents[name])) for name in names}
        return profile.with_values(values)

    def misfit(exponents: Mapping[str, float]) -> float:
        return _misfit(moved(exponents), observations)

    def error(exponents: Mapping[str, float]) -> float:
        prior = sum((value / _PRIOR_SIGMA) ** 2 for value in exponents.values()) / len(names)
        return math.sqrt(misfit(exponents) ** 2 + _PRIOR_WEIGHT * prior)

    at = dict.fromkeys(names, 0.0)
    before = least = error(at)
    sweep = 0
    for size in _STEPS:
        for _ in range(_SWEEPS):
            has_moved = False
            for name in names:
                for direction in (size, -size):
                    tried = {**at, name: at[name] + direction}
                    found = error(tried)
                    if found < least * (1 - 1e-4):
                        at, least, has_moved = tried, found, True
                        break
            sweep += 1
            if on_sweep is not None:
                on_sweep(sweep, least)
            if not has_moved:
                break
    refined = moved(at)
    known = misfit(at)
    return Refinement(
        profile=refined,
        before=before,
        after=known,
        factors={name: refined.figures()[name].value / probed[name] for name in names},
        sensitivity={
            name: min(misfit({**at, name: at[name] + d}) - known for d in (_QUARTER, -_QUARTER))
            for name in names
        },
        residuals={
            o.label: math.log(predict(refined, o).step_seconds / o.step_seconds)
            for o in observations
        },
    )


def _bounded(name: str, value: float) -> float:
    low, high = _BOUNDS.get(name, (0.0, math.inf))
    return min(high, max(low, value))


def _misfit(profile: HardwareProfile, observations: Sequence[Observation]) -> float:
    """Return the root mean square error of steps (logarithms), stalls and lanes (of a step).

    A lane counts by its share of the step: one that hardly works says little.
    """
    total = weights = 0.0
    for observation in observations:
        predicted = predict(profile, observation)
        step = observation.step_seconds
        total += 4.0 * math.log(predicted.step_seconds / step) ** 2
        total += 2.0 * ((predicted.stall_seconds - observation.stall_seconds) / step) ** 2
        weights += 6.0
        for lane, seconds in observation.busy_seconds.items():
            total += ((predicted.busy_seconds.get(lane, 0.0) - seconds) / step) ** 2
            weights += 1.0
    return math.sqrt(total / weights)
