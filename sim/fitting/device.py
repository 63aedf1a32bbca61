"""Device: a GPU's constants of compute, from measured passes and the table's as a start.

A pass takes the longer of its kernels' work and of their launches (`sim.timing.costs`), so its
seconds are no sum of constants. Constants move from the table's by as little as tells the passes,
each in proportion to its uncertainty there. Those of which no pass says anything stay as they are.
None passes its bound: no card is faster than its peak.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from sim.fitting.fit import AbstractFit
from sim.fitting.marquardt import Array, least_errors
from sim.hardware.components import Device
from sim.hardware.quantity import RANGES, Quantity
from sim.models.work import LayerWork, Work
from sim.models.workload import Workload
from sim.timing.costs import layer_seconds
from zenflow.errors import ConfigError

_FITTED = (
    "sustained_share",
    "matmul_latency",
    "attention_efficiency",
    "attention_backward_efficiency",
    "native_attention_efficiency",
    "native_attention_backward_efficiency",
    "bandwidth_efficiency",
    "launch",
    "backward_launch",
    "backward_factor",
)
"""Constants of a device that passes tell, as far as the device has them."""
_NOISE = 0.05
"""Relative spread of a measured pass about what the constants tell."""
SOURCE = "fit to forward and backward of decoders, from the table's"
"""Source of a fitted constant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeTimes:
    """One shape's measurement: medians, seconds."""

    label: str
    """Name of the shape, for tables."""
    workload: Workload
    """Model and batch that were timed."""
    forward: float
    """Seconds of forward."""
    backward: float | None = None
    """Seconds of backward; None where nothing but forward was measured."""


@dataclass(frozen=True, slots=True)
class DeviceFit(AbstractFit):
    """A fitted device, and how well it tells the measurements. See `fit_device`."""

    device: Device
    """Device with fitted constants; their uncertainties are what the passes leave of them."""
    residuals: Mapping[str, float]
    """Relative error of each pass: predicted over measured minus 1."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """Each fitted constant over the one that it started from."""


def fit_device(device: Device, times: Sequence[ComputeTimes]) -> DeviceFit:
    """Return a GPU whose constants tell measured passes best.

    Args:
        device: Where the fit starts, with uncertainties of its constants.
        times: Measured passes. Large models show work, small ones show launches.

    Raises:
        ConfigError: Nothing was measured, a pass took no time, or the device is a CPU, whose
            constants add up (`sim.fitting.fit`).

    Examples:
        Passes of a small model on a host that launches half as fast as the table's:

        >>> from sim.hardware.catalog import find_device
        >>> from sim.models.table import find_model
        >>> workload = Workload.of_config(*find_model("gpt2"), batch_size=1, sequence=64)
        >>> start = find_device("h100")
        >>> slow = replace(start, launch=replace(start.launch, value=50e-6))
        >>> forward, _ = pass_seconds(slow, workload)
        >>> times = ComputeTimes(label="gpt2", workload=workload, forward=forward)
        >>> round(fit_device(start, [times]).factors["launch"], 1)
        2.0
    """
    if device.is_cpu:
        raise ConfigError(f"{device.name} is a CPU: fit sums of constants to its passes")
    measured = [own.forward for own in times]
    measured += [own.backward for own in times if own.backward is not None]
    if not measured or min(measured) <= 0:
        raise ConfigError("a fit needs passes, each of more than 0 s: measure longer")
    names = [name for name in _FITTED if getattr(device, name) is not None]
    starts: list[Quantity] = [getattr(device, name) for name in names]
    spreads = np.array([start.uncertainty for start in starts])
    labels, passes = _passes_of(times)

    def moved(at: Array) -> Device:
        changed: dict[str, Any] = {
            name: replace(start, value=start.value * math.exp(move))
            for name, start, move in zip(names, starts, at, strict=True)
        }
        return replace(device, **changed)

    def errors(at: Array) -> Array:
        return np.append(_log_errors(moved(at), passes) / _NOISE, at / spreads)

    high = [math.log(_highest(name) / s.value) for name, s in zip(names, starts, strict=True)]
    found = least_errors(errors, np.full(len(names), -math.inf), np.array(high))
    left = np.sqrt(np.diag(np.linalg.inv(found.slopes.T @ found.slopes)))
    fitted: dict[str, Any] = {
        name: Quantity(
            value=min(_highest(name), start.value * math.exp(move)), kind="measured",
            source=f"{SOURCE} {start.value:.3g}", sigma=float(sigma),
        )
        for name, start, move, sigma in zip(names, starts, found.at, left, strict=True)
    }  # fmt: skip
    result = replace(device, **fitted)
    off = np.expm1(_log_errors(result, passes))
    return DeviceFit(
        device=result,
        residuals=dict(zip(labels, map(float, off), strict=True)),
        factors=dict(zip(names, map(float, np.exp(found.at)), strict=True)),
    )


def pass_seconds(device: Device, workload: Workload) -> tuple[float, float]:
    """Return the seconds of a workload's forward and backward, one micro-batch.

    Raises:
        ConfigError: The device's peak for the workload's dtype is not known.
    """
    return _summed(device, _counted(workload), workload.dtype)


_Pass = tuple[list[tuple[LayerWork, int]], str, list[float]]
"""Layers' works with their numbers, dtype, and measured seconds of forward and maybe backward."""


def _passes_of(times: Sequence[ComputeTimes]) -> tuple[list[str], list[_Pass]]:
    labels: list[str] = []
    passes: list[_Pass] = []
    for own in times:
        measured = {"forward": own.forward, "backward": own.backward}
        known = {name: seconds for name, seconds in measured.items() if seconds is not None}
        labels += [f"{own.label} {name}" for name in known]
        passes.append((_counted(own.workload), own.workload.dtype, list(known.values())))
    return labels, passes


def _counted(workload: Workload) -> list[tuple[LayerWork, int]]:
    """Return works with the number of layers that each is of: many layers are alike."""
    works = Work(workload).all()
    counts = Counter(map(id, works))
    by_id = {id(work): work for work in works}
    return [(by_id[key], count) for key, count in counts.items()]


def _summed(
    device: Device, works: Sequence[tuple[LayerWork, int]], dtype: str
) -> tuple[float, float]:
    forward = backward = 0.0
    for work, count in works:
        own = layer_seconds(work, device, dtype)
        forward += count * own[0]
        backward += count * own[1]
    return forward, backward


def _log_errors(device: Device, passes: Sequence[_Pass]) -> Array:
    """Return the logarithm of predicted over measured seconds of each pass."""
    return np.array(
        [
            math.log(predicted / seconds)
            for works, dtype, measured in passes
            for predicted, seconds in zip(_summed(device, works, dtype), measured, strict=False)
        ]
    )


def _highest(name: str) -> float:
    return RANGES.get(f"device.{name}", (0.0, math.inf))[1]
