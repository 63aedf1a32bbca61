"""Layers' seconds from a traced step: as measured, or scaled to other work and devices.

Products scale with their FLOP over the rate that they sustain, attention with its FLOP over its
own rate, all else with bytes over the memory's bandwidth. Launches take the host as long as
before: that time is a floor. On the device and the work that were traced nothing is scaled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from sim.hardware.catalog import find_device
from sim.hardware.components import Device, EngineOverheads
from sim.hardware.profile import HardwareProfile
from sim.hardware.quantity import Quantity
from sim.models.work import LayerWork, Work
from sim.models.workload import Workload
from sim.names import fold
from sim.traced.passes import PassTimes
from sim.traced.step import TracedStep
from zenflow.errors import ConfigError

_UNCERTAIN = (
    "flops", "matmul_efficiency", "sustained_share", "bandwidth", "bandwidth_efficiency",
)  # fmt: skip
"""Quantities of a device by which a trace is scaled."""

_LEAST = 1e-9
"""Seconds of an overhead that the trace has none of; quantities must be positive."""
_BEYOND = 2.0
"""Times a device's peak that no step reaches: 8-bit products are twice as fast as the table's."""
_WITHOUT_AGAIN = 2 / 3
"""Share of a backward that recomputes all layers which is not recomputation, by count of FLOP."""


@dataclass(frozen=True, slots=True)
class _Factors:
    """Factors on the seconds of each kind of work."""

    products: float = 1.0
    attention: float = 1.0
    other: float = 1.0


def is_of(step: TracedStep, device: Device) -> bool:
    """Return whether a step was traced on a device of this type."""
    if step.device is None or device.is_cpu:
        return step.device is None and device.is_cpu
    if fold(step.device) == fold(device.name):
        return True
    try:
        return find_device(step.device).name == device.name
    except ConfigError:
        return False


def traced_seconds(
    step: TracedStep, workload: Workload, device: Device
) -> list[tuple[float, float]]:
    """Return the seconds of every layer's forward and backward, with what is recomputed.

    Each pass is shared out among layers as the model's shapes have its kinds of work.

    Args:
        step: Mean step of a trace; where its batch is not known it is the workload's.
        workload: What is asked: it may be of other batches than the trace.
        device: What it is asked of.

    Raises:
        ConfigError: The trace can't be scaled to the device.
    """
    works = Work(workload).all()
    seen = _traced_works(step, workload)
    factors = _device_factors(step, workload.dtype, device)
    factors = _Factors(
        factors.products * step.rounding * _ratio(works, seen, _matmul_flop),
        factors.attention * step.rounding * _ratio(works, seen, _attention_flop),
        factors.other * step.rounding * _ratio(works, seen, _elementwise_bytes),
    )
    forward, backward = step.forward, step.backward
    share = float(workload.checkpointing)  # what is no share is no workload with a trace
    if step.recomputes:
        backward = backward * (_WITHOUT_AGAIN + share * (1.0 - _WITHOUT_AGAIN))
    elif share:
        backward = backward + forward * share
    first, second = _shares(forward, works), _shares(backward, works)
    walls = _wall(forward, factors), _wall(backward, factors)
    return [(walls[0] * f, walls[1] * b) for f, b in zip(first, second, strict=True)]


def _traced_works(step: TracedStep, workload: Workload) -> list[LayerWork]:
    return Work(
        replace(
            workload,
            batch_size=step.batch_size or workload.batch_size,
            sequence=step.sequence or workload.sequence,
        )
    ).all()


def peak_share(step: TracedStep, workload: Workload, device: Device) -> float | None:
    """Return FLOP/s of the traced forward and backward, over the peak of the traced device.

    None where that device is not known.

    Args:
        step: Mean step of a trace, with the micro-batches that it is of.
        workload: The model.
        device: The device that is asked for, which stands for a CPU that was traced.
    """
    if step.device is None and not device.is_cpu:
        return None
    traced = device if is_of(step, device) else find_device(str(step.device))
    works = _traced_works(step, workload)
    flop = 3.0 * math.fsum(work.matmul_flop + work.attention_flop for work in works)
    peak = max(quantity.value for quantity in traced.flops.values())
    return flop / peak / (step.forward.wall + step.backward.wall)


def check_rate(step: TracedStep, workload: Workload, device: Device) -> None:
    """Refuse micro-batches that the traced device can't have computed in the traced time.

    Only where the trace has no shapes: else they say what was computed.

    Raises:
        ConfigError: Forward and backward would be far beyond the device's peak.
    """
    if step.batches:
        return
    share = peak_share(step, workload, device)
    if share is not None and share > _BEYOND:
        raise ConfigError(
            f"{step.path}: micro-batches of {step.batch_size} x {step.sequence} tokens of "
            f"{workload.name} would be {share:,.1f} times the FLOP/s of the traced device: give "
            "--traced-batch as it was traced, or trace with record_shapes=True"
        )


def traced_overheads(
    step: TracedStep, num_params: int, dtype: str, hardware: HardwareProfile
) -> EngineOverheads:
    """Return the machine's overheads with the traced step of the optimizer.

    The device updates as many parameters a second as the traced optimizer did, if that was AdamW.
    What a step took beside that, and outside of its passes, is the overhead of every step.
    """
    times, own = step.optimizer, hardware.overheads
    factors = _device_factors(step, dtype, hardware.device)
    busy = times.busy * factors.other
    idle = _wall(times, factors) - busy

    def traced(value: float) -> Quantity:
        return Quantity(value=value, kind="measured", source=step.path)

    return replace(
        own,
        step=traced(max(_LEAST, step.rest + idle)),
        device_update=traced(num_params / busy)
        if busy > 0 and step.is_adamw
        else own.device_update,
    )


def scaling_spread(step: TracedStep | None, hardware: HardwareProfile) -> float:
    """Return the spread that scaling a trace to another device adds to a prediction.

    That is the spread of the traced device's quantities, as a standard deviation of the logarithm;
    those of the other device are drawn. 0 where nothing is scaled.
    """
    if step is None or step.device is None or is_of(step, hardware.device):
        return 0.0
    device = find_device(step.device)
    found = []
    for name in _UNCERTAIN:
        quantity = getattr(device, name)
        quantity = next(iter(quantity.values())) if name == "flops" else quantity
        found += [] if quantity is None else [math.log1p(quantity.uncertainty**2)]
    return math.sqrt(sum(found))


def _device_factors(step: TracedStep, dtype: str, device: Device) -> _Factors:
    """Return the time of each kind of work on a device, over that on the traced one.

    Raises:
        ConfigError: One of the two is a CPU, or the traced one is not in the table.
    """
    if is_of(step, device):
        return _Factors()
    if step.device is None or device.is_cpu:
        traced = "a CPU" if step.device is None else step.device
        raise ConfigError(
            f"{step.path} was traced on {traced}, which says nothing of {device.name}: trace on a "
            "GPU for a GPU, and name a CPU's own profile (zenflow calibrate) for a CPU"
        )
    old = find_device(step.device)
    for known in (old, device):
        if dtype not in known.flops:
            raise ConfigError(
                f"{known.name} has no peak for {dtype}: it has {', '.join(known.flops)}"
            )
    return _Factors(
        old.product_rate(dtype) / device.product_rate(dtype),
        old.attention_rate(dtype) / device.attention_rate(dtype),
        _byte_rate(old) / _byte_rate(device),
    )


def _byte_rate(device: Device) -> float:
    return device.bandwidth.value * device.bandwidth_efficiency.value


def _wall(times: PassTimes, factors: _Factors) -> float:
    """Return the seconds of a pass whose device works longer by these factors, or shorter."""
    busy = (
        factors.products * times.products
        + factors.attention * times.attention
        + factors.other * times.other
    )
    gaps = times.wall - max(times.busy, times.host)  # of neither: waits of streams for one another
    return max(busy, times.host) + gaps


_matmul_flop = attrgetter("matmul_flop")
_attention_flop = attrgetter("attention_flop")
_elementwise_bytes = attrgetter("elementwise_bytes.forward")


def _ratio(
    works: Sequence[LayerWork], seen: Sequence[LayerWork], of: Callable[[LayerWork], float]
) -> float:
    before = math.fsum(map(of, seen))
    return math.fsum(map(of, works)) / before if before else 1.0


def _shares(times: PassTimes, works: Sequence[LayerWork]) -> list[float]:
    """Return the layers' shares of a pass, which add up to 1."""

    def share(of: Callable[[LayerWork], float]) -> list[float]:
        each = [float(of(work)) for work in works]
        whole = math.fsum(each)
        return [value / whole if whole else 1 / len(each) for value in each]

    kinds = zip(share(_matmul_flop), share(_attention_flop), share(_elementwise_bytes),
                share(attrgetter("num_kernels")), strict=True)  # fmt: skip
    if not times.busy:
        return [kernels for *_, kernels in kinds]
    return [
        (times.products * p + times.attention * a + times.other * o) / times.busy
        for p, a, o, _ in kinds
    ]
