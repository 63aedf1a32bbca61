"""Costs from phase times: what a published breakdown or a trace says of one step."""

from __future__ import annotations

import math
from collections.abc import Iterator

from sim.hardware.profile import (
    Device,
    EngineOverheads,
    HardwareProfile,
    Host,
    Link,
    Quantity,
)
from sim.timing.costs import Segment, StepCosts
from zenflow.config import raise_violations

_NOTHING = 1e-12
"""Seconds that stand for none: figures must be positive."""
_ENDLESS = 1e18
"""Bytes/s, FLOP/s and bytes that bound nothing."""
_UPDATE_BYTES = 28
"""Bytes of DRAM per parameter that the given update stands for."""


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
        intake: Of taking one step's gradients in on the host without an update; a breakdown that
            does not name it has it in none of its phases.
        num_layers: Layers that the phases are spread over.
        name: For tables.

    Raises:
        ConfigError: A time or a count breaks its rule; the message lists all.
    """
    times = {"forward": forward, "backward": backward, "d2h": d2h, "update": update, "h2d": h2d}
    raise_violations("the phases", _violations(times, intake, num_params, num_layers))
    size = 2
    each = num_params // num_layers
    columns = max(64, math.isqrt(each))
    segment = {"matrices": ((each // columns, columns),), "vectors": each % columns}
    # A window's gradients in mid-window cost the engine's bytes, scaled to the time given.
    speed = num_params * _UPDATE_BYTES / update
    engine_intake = num_params * (size + 16) / speed
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
    source = "not part of the phases"
    unbounded = Quantity(value=_ENDLESS, source=source)
    nothing, one = Quantity(value=_NOTHING, source=source), Quantity(value=1.0, source=source)

    def measured(value: float) -> Quantity:
        return Quantity(value=value, kind="measured", source=name)

    return HardwareProfile(
        name=name,
        device=Device(
            name=name,
            memory=unbounded,
            flops={"bfloat16": unbounded},
            matmul_efficiency=one,
            matmul_latency=nothing,
            attention_efficiency=one,
            bandwidth=unbounded,
            bandwidth_efficiency=one,
            launch=nothing,
        ),
        link=Link(
            name=name,
            d2h=measured(d2h),
            h2d=measured(h2d),
            duplex=one,
            pageable=one,
            latency=nothing,
        ),
        host=Host(
            name=name,
            sockets=1,
            cores=1,
            dram=unbounded,
            dram_bytes=unbounded,
            core_bandwidth=measured(host),
            numa_hop=one,
            core_sharing=one,
        ),
        overheads=EngineOverheads(
            host_task=nothing,
            copy=nothing,
            bucket=nothing,
            step=nothing,
            select=nothing,
            intake_bandwidth=unbounded,
            pack_bandwidth=unbounded,
            device_update=unbounded,
        ),
        host_threads=1,
    )
