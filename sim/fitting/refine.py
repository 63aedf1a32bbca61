"""Refine: move a profile's constants until the simulator reproduces measured runs.

Probes measure parts by themselves. In a run the parts meet, and a constant also has to stand for
costs of the meeting: hand-overs between threads, caches that another part has used. So the
constants of the engine's parts are moved, each within reason of its probe, until simulated runs
agree with measured ones. What a device computes, and the link, are not touched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from sim.fitting.marquardt import Array, least_errors, size
from sim.hardware.profile import HardwareProfile
from sim.hardware.quantity import RANGES, bounded
from sim.models.workload import Workload
from sim.simulate import Prediction, Strategy
from sim.steady import steady
from sim.timing.costs import costs_of

_DEVICE_RATES = (
    "overheads.intake_bandwidth",
    "overheads.pack_bandwidth",
    "overheads.unpack_bandwidth",
    "overheads.device_update",
    "overheads.column_update",
)
"""Rates of the engine's passes on the device."""
ENGINE_CONSTANTS = (
    "host.core_bandwidth",
    "host.core_sharing",
    "host.core_update",
    "overheads.host_task",
    "overheads.copy",
    "overheads.bucket",
    "overheads.step",
    *_DEVICE_RATES,
)
"""Constants that runs refine, and no others."""

_PRIOR_SIGMA = 1.0
"""Log-normal spread of a constant about its probe: a factor of e is no surprise."""
_TIMED_SIGMA = 0.2
"""Spread of a GPU's rates about their probes: kernels by themselves, on large matrices."""
_PRIOR_WEIGHT = 1e-3
_QUARTER = math.log(1.25)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One measured run in its steady state."""

    label: str
    """Name of the run, for tables."""
    workload: Workload
    """Model and batch of the run."""
    strategy: Strategy
    """Strategy of the run."""
    step_seconds: float
    """Measured seconds of a step."""
    stall_seconds: float | None
    """Measured stall of a step; None where waits for collectives could not be told from work."""
    busy_seconds: Mapping[str, float]
    """Measured seconds of work of each lane, per step."""
    link: tuple[float, float] | None = None
    """Bytes/s to the host and back, where a link was emulated."""
    passes: Mapping[str, float] = field(default_factory=dict)
    """Measured seconds of the device's forward and backward, per step; none where they hold waits
    for collectives."""


@dataclass(frozen=True, slots=True)
class Refinement:
    """A refined profile and how it came about."""

    profile: HardwareProfile
    """The machine with refined constants."""
    before: float
    """Root mean square of the log errors with the probes' constants."""
    after: float
    """Root mean square of the log errors with the refined constants."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """Each constant over its probe's."""
    sensitivity: Mapping[str, float] = field(default_factory=dict)
    """Growth of the error when a constant is off by a quarter, by the slopes at the end.

    Near 0 the runs say nothing of the constant, and the probe's value stands."""
    residuals: Mapping[str, float] = field(default_factory=dict)
    """Log of predicted over measured step time of each run."""


def on_link(profile: HardwareProfile, link: tuple[float, float] | None) -> HardwareProfile:
    """Return the profile with an emulated link's rates, if there is one."""
    if link is None:
        return profile
    return profile.with_values({"link.d2h": link[0], "link.h2d": link[1]})


def predict(profile: HardwareProfile, observation: Observation) -> Prediction:
    """Return the prediction of an observed run by a profile."""
    costs = costs_of(observation.workload, on_link(profile, observation.link))
    return steady(costs, observation.strategy)


def refine(
    profile: HardwareProfile,
    observations: Sequence[Observation],
    *,
    names: Sequence[str] = ENGINE_CONSTANTS,
    on_sweep: Callable[[int, float], None] | None = None,
) -> Refinement:
    """Return the profile whose named constants reproduce the observed runs best.

    Least squares over the constants' logarithms by Levenberg and Marquardt's method, with a weak
    pull towards the probes.

    Args:
        profile: With the probes' constants.
        observations: Measured runs.
        names: Constants that may move, as far as the profile has them.
        on_sweep: Told after each move of all constants: its number, and the error.
    """
    quantities = profile.quantities()
    names = [name for name in names if name in quantities]
    probed = {name: quantities[name].value for name in names}
    is_timed = [not profile.device.is_cpu and name in _DEVICE_RATES for name in names]
    spreads = np.where(is_timed, _TIMED_SIGMA, _PRIOR_SIGMA)
    pull = math.sqrt(_PRIOR_WEIGHT / len(names)) / spreads

    def moved(at: Array) -> HardwareProfile:
        found = zip(names, at, strict=True)
        return profile.with_values({n: bounded(n, probed[n] * math.exp(e)) for n, e in found})

    def errors(at: Array) -> Array:
        return np.append(_errors(moved(at), observations), pull * at)

    bounds = [RANGES.get(name, (0.0, math.inf)) for name in names]
    low, high = (
        np.array([_exponent(b[end] / probed[n]) for n, b in zip(names, bounds, strict=True)])
        for end in (0, 1)
    )

    found = least_errors(errors, low, high, on_sweep=on_sweep)
    refined, known = moved(found.at), found.errors[: -len(names)]
    return Refinement(
        profile=refined,
        before=found.before,
        after=size(known),
        factors={name: refined.quantities()[name].value / probed[name] for name in names},
        sensitivity={
            name: math.hypot(size(known), _QUARTER * size(slope)) - size(known)
            for name, slope in zip(names, found.slopes[: -len(names)].T, strict=True)
        },
        residuals={
            o.label: math.log(predict(refined, o).step_seconds / o.step_seconds)
            for o in observations
        },
    )


def _as_observed(predicted: Prediction) -> dict[str, float]:
    """Return seconds of lanes and passes as spans on the device have them.

    A span begins with its first kernel and ends with its last. Where the host launches late, the
    kernels between wait, which counts as work.
    """
    busy, passes = predicted.busy_seconds, predicted.passes
    launching = busy.get("launch", 0.0)
    backward = max(passes["backward"], launching - passes["forward"])
    return {**busy, **passes, "device": max(busy["device"], launching), "backward": backward}


def _parts_off(predicted: Prediction, observation: Observation) -> list[float]:
    """Return the errors of forward, backward and the rest of the device's step, seconds."""
    found = _as_observed(predicted)
    passes = [found[name] - own for name, own in observation.passes.items()]
    stall = predicted.stall_seconds - (observation.stall_seconds or 0.0)
    whole = predicted.step_seconds - observation.step_seconds
    return [*passes, whole - stall - sum(passes)]


def _exponent(factor: float) -> float:
    return math.log(factor) if 0 < factor < math.inf else math.copysign(math.inf, factor - 1)


def _errors(profile: HardwareProfile, observations: Sequence[Observation]) -> Array:
    """Return errors of steps (logarithms), stalls, passes and lanes (of a step), weighted.

    The sum of their squares is a mean. A lane counts by its share of the step: one that hardly
    works says little. Passes tell what a constant costs where: without them one that is too low
    is made up for by another.
    """
    found: list[tuple[float, float]] = []
    for observation in observations:
        predicted = predict(profile, observation)
        step = observation.step_seconds
        found.append((4.0, math.log(predicted.step_seconds / step)))
        if observation.stall_seconds is not None:
            found.append((2.0, (predicted.stall_seconds - observation.stall_seconds) / step))
        if observation.passes:
            found += [(2.0, off / step) for off in _parts_off(predicted, observation)]
        busy = _as_observed(predicted)
        for lane, seconds in observation.busy_seconds.items():
            if lane == "device" and observation.passes:
                continue
            found.append((1.0, (busy.get(lane, 0.0) - seconds) / step))
    total = sum(weight for weight, _ in found)
    return np.array([math.sqrt(weight / total) * error for weight, error in found])
