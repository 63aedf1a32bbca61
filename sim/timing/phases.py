"""Costs from the phase times of one step: a published breakdown or a trace."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from sim.hardware.cells import dimension_of
from sim.hardware.components import Device, EngineOverheads, Host, Link
from sim.hardware.profile import HardwareProfile
from sim.hardware.quantity import Quantity
from sim.timing.costs import StepCosts
from sim.timing.segments import Segment
from zenflow.config import raise_violations

_Record = TypeVar("_Record")

_NEUTRAL = {
    dimension: Quantity(value=value, source="not part of the phases")
    for dimension, value in {
        "seconds": 1e-12,  # quantities must be positive
        "ratio": 1.0,
        "bytes": 1e18,
        "bytes/s": 1e18,
        "FLOP/s": 1e18,
        "parameters/s": 1e18,
    }.items()
}
"""Quantity that costs nothing and bounds nothing, by dimension."""
_UPDATE_BYTES = 28
"""Bytes of DRAM per parameter that the given update stands for."""
_INTAKE_BYTES = 10
"""Bytes of DRAM per parameter of a gradient that is added to a sum."""


def costs_of_phases(
    *,
    forward: float,
    backward: float,
    d2h: float,
    update: float,
    h2d: float,
    num_params: int,
    intake: float = 0.0,
    num_layers: int = 32,
    name: str = "phases",
) -> StepCosts:
    """Return costs with which each phase, alone, takes the seconds given.

    Each phase is of the whole model, in 16 bits, and spread evenly over the layers. Phases on
    different resources do not slow one another down.

    Args:
        forward: Seconds of forward.
        backward: Of backward, without waiting for copies.
        d2h: Of all gradients on their way to the host.
        update: Of CPU AdamW over all parameters.
        h2d: Of all weights on their way back.
        num_params: Parameters of the model.
        intake: Of adding one step's gradients to sums on the host, as the published rule does; a
            breakdown that does not name it has it in none of its phases.
        num_layers: Layers that the phases are spread over.
        name: For tables.

    Raises:
        ConfigError: A time or a count breaks its rule; the message lists all.

    See `sim.simulate.simulate` for an example.
    """
    times = {"forward": forward, "backward": backward, "d2h": d2h, "update": update, "h2d": h2d}
    raise_violations("the phases", _violations(times, intake, num_params, num_layers))
    size = 2
    each = num_params // num_layers
    columns = max(64, math.isqrt(each))
    segment = {"matrices": ((each // columns, columns),), "vectors": each % columns}
    speed = num_params * _UPDATE_BYTES / update
    engine_intake = num_params * _INTAKE_BYTES / speed
    return StepCosts(
        segments=tuple(
            Segment(
                name=f"layers.{index}",
                forward=forward / num_layers,
                backward=backward / num_layers,
                **segment,  # type: ignore[arg-type]
            )
            for index in range(num_layers)
        ),
        hardware=_hardware(name, num_params * size / d2h, num_params * size / h2d, speed),
        dtype_bytes=size,
        intake_factor=intake / engine_intake,
    )


def _violations(
    times: dict[str, float], intake: float, num_params: int, num_layers: int
) -> Iterator[str]:
    for name, seconds in times.items():
        if not (math.isfinite(seconds) and seconds > 0):
            yield f"{name} must be a positive number of seconds, got {seconds}"
    if not (math.isfinite(intake) and intake >= 0):
        yield f"intake must be a number of seconds >= 0, got {intake}"
    if num_layers < 1 or num_params < 64 * max(1, num_layers):
        yield (
            f"num_params must be at least 64 for each of num_layers >= 1 layers, got {num_params} "
            f"and {num_layers}"
        )


def _hardware(name: str, d2h: float, h2d: float, host: float) -> HardwareProfile:
    """Return a machine that these rates, bytes/s, alone bound."""

    def measured(value: float) -> Quantity:
        return Quantity(value=value, kind="measured", source=name)

    return HardwareProfile(
        name=name,
        device=_free(Device, name=name, flops={"bfloat16": _NEUTRAL["FLOP/s"]}),
        link=_free(Link, name=name, d2h=measured(d2h), h2d=measured(h2d)),
        host=_free(
            Host,
            name=name,
            sockets=1,
            cores=1,
            core_bandwidth=measured(host),
            core_update=_NEUTRAL["parameters/s"],
        ),
        overheads=_free(EngineOverheads),
        host_threads=1,
    )


def _free(make: type[_Record], **given: Any) -> _Record:
    """Return a record of the machine whose other quantities cost nothing and bound nothing."""
    for item in fields(make):  # type: ignore[arg-type]
        if item.name not in given and item.default is MISSING:
            given[item.name] = _NEUTRAL[dimension_of(item.name)]
    return make(**given)
