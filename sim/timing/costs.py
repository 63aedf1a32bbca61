"""Costs: the seconds of each part of a step, from a workload and a machine.

A `StepCosts` is all that schedules know of a model: segments in the order of forward, each with
its seconds on the device and its parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from sim.hardware.components import Device
from sim.hardware.profile import HardwareProfile
from sim.models.activations import Activations
from sim.models.shapes.parts import Layer
from sim.models.work import LayerWork, Work
from sim.models.workload import Workload
from sim.timing.segments import Segment, cut, delayed
from sim.timing.traced import traced_overheads, traced_seconds
from sim.timing.trainers import trainer_seconds
from zenflow.config import ZenFlowConfig
from zenflow.errors import ConfigError

_BothWays = tuple[float, float]
"""Seconds of forward and of backward."""

_ATTENTION_BACKWARD = 2.5
"""Attention's backward over its forward: five products for two, scores being recomputed
(Dao 2023, FlashAttention-2, section 3.1)."""
_KEPT_ATTENTION_BACKWARD = 2.0
"""Attention's backward over its forward where scores are kept."""
_FREE = 1e-12
"""Seconds of a launch that bounds nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Seconds of each part of one step of a model on a machine. See `costs_of`.

    Raises:
        ConfigError: There is no segment, or a duration is negative.
    """

    segments: tuple[Segment, ...]
    """Segments in the order of forward."""
    hardware: HardwareProfile
    """Machine that the seconds are of."""
    dtype_bytes: int = 2
    """Bytes of an element of the model."""
    accumulation: int = 1
    """Number of micro-batches of a step."""
    intake_factor: float = 1.0
    """Factor on the host's bytes for gradients that are added to sums; 0 for phases that leave it
    out."""
    workload: Workload | None = None
    """Workload whose costs these are; None for phases that were given."""

    def __post_init__(self) -> None:
        """Check the assumptions of every schedule."""
        if not self.segments:
            raise ConfigError("a step needs at least one segment: give the model's layers")
        for segment in self.segments:
            if not (segment.forward >= 0 and segment.backward >= 0):
                raise ConfigError(
                    f"durations must be >= 0, got {segment.forward} and {segment.backward} s for "
                    f"{segment.name}"
                )

    @property
    def num_params(self) -> int:
        """Parameters of the model."""
        return sum(segment.numel for segment in self.segments)

    @property
    def forward_seconds(self) -> float:
        """Seconds of one micro-batch's forward."""
        return sum(segment.forward for segment in self.segments)

    @property
    def backward_seconds(self) -> float:
        """Seconds of one micro-batch's backward."""
        return sum(segment.backward for segment in self.segments)

    @property
    def elementwise_bandwidth(self) -> float:
        """Bytes/s that elementwise operations on the device move."""
        device = self.hardware.device
        return device.bandwidth.value * device.bandwidth_efficiency.value

    @property
    def are_launched(self) -> bool:
        """Whether the host launches kernels beside the device, in seconds that are known.

        A CPU that plays the device launches nothing ahead, and phases or a trace have it in them.
        """
        is_known = self.workload is not None and self.workload.traced is None
        return is_known and not self.hardware.device.is_cpu

    @property
    def launching_seconds(self) -> float:
        """Seconds in which the host launches forward and backward of all micro-batches."""
        return self.accumulation * sum(sum(segment.launching) for segment in self.segments)

    @property
    def compute_seconds(self) -> float:
        """Forward and backward of all micro-batches of a step."""
        return self.accumulation * (self.forward_seconds + self.backward_seconds)


def is_split(numel: int, config: ZenFlowConfig) -> bool:
    """Whether a matrix of so many elements is shared out, as the engine decides it."""
    return config.topk_ratio < 1 and numel >= max(1, config.min_split_elements)


def costs_of(workload: Workload, hardware: HardwareProfile) -> StepCosts:
    """Return the costs of a step, from the machine and the model's shapes or a trace.

    Raises:
        ConfigError: The device's peak for the workload's dtype is not known, or the workload's
            trace says nothing of the device.

    Examples:
        >>> from sim.hardware.catalog import find_machine
        >>> from sim.models.table import find_model
        >>> workload = Workload.of_config(*find_model("llama-2-7b"), batch_size=8)
        >>> costs = costs_of(workload, find_machine("dgx-a100-80", 1))
        >>> round(costs.forward_seconds, 2), round(costs.backward_seconds, 2)
        (0.61, 1.22)
    """
    shapes = {id(own.parameters): _shapes(own) for own in workload.distinct_layers}
    leaving = Activations(workload).leaving_bytes()
    segments = [
        Segment(
            name=layer.name,
            forward=forward,
            backward=backward,
            launching=launching,
            leaving=away,
            **shapes[id(layer.parameters)],
        )
        for layer, ((forward, backward), launching), away in zip(
            workload.layers, _layers_seconds(workload, hardware.device), leaving, strict=True
        )
    ]
    traced = workload.traced
    if traced is not None:
        overheads = traced_overheads(traced, workload.num_params, workload.dtype, hardware)
        hardware = replace(hardware, overheads=overheads)
    return StepCosts(
        segments=delayed(cut(segments), trainer_seconds(workload)),
        hardware=hardware,
        dtype_bytes=workload.dtype_bytes,
        accumulation=workload.accumulation,
        workload=workload,
    )


def without_launches(costs: StepCosts) -> StepCosts:
    """Return a workload's costs if launching took the host no time: the work of the kernels.

    Args:
        costs: Of a workload, and not of given phases.
    """
    assert costs.workload is not None
    names = costs.hardware.quantities()
    free = {name: _FREE for name in names if name.startswith("device.") and "launch" in name}
    return costs_of(costs.workload, costs.hardware.with_values(free))


def _shapes(layer: Layer) -> dict[str, Any]:
    """Return the fields of a segment that are shapes of a layer's parameters."""
    shapes = [parameter.shape for parameter in layer.parameters]
    vectors = [shape[0] for shape in shapes if len(shape) == 1]
    return {
        "matrices": tuple((own[0], math.prod(own[1:])) for own in shapes if len(own) > 1),
        "vectors": sum(vectors),
        "num_vectors": len(vectors),
    }


def _layers_seconds(workload: Workload, device: Device) -> list[tuple[_BothWays, _BothWays]]:
    """Return every layer's seconds, and those in which the host launches it.

    With what is recomputed. Launching is 0 where a trace has it.
    """
    if workload.traced is not None:
        traced = traced_seconds(workload.traced, workload, device)
        return [(seconds, (0.0, 0.0)) for seconds in traced]
    known: dict[int, tuple[_BothWays, _BothWays]] = {}
    found = []
    for work, again in zip(Work(workload).all(), Work(workload).again(), strict=True):
        seconds, launching = _both(work, workload, device, known)
        if again is not None:
            more, launched = _both(again, workload, device, known)
            seconds = seconds[0], seconds[1] + more[0]
            launching = launching[0], launching[1] + launched[0]
        found.append((seconds, launching))
    return found


def _both(
    work: LayerWork,
    workload: Workload,
    device: Device,
    known: dict[int, tuple[_BothWays, _BothWays]],
) -> tuple[_BothWays, _BothWays]:
    """Return a work's seconds and launches; layers that are alike have the same work."""
    if id(work) not in known:
        is_compiled = workload.kernels == "compiled"
        known[id(work)] = (
            layer_seconds(work, device, workload.dtype, is_compiled=is_compiled),
            launch_seconds(work, device, is_compiled=is_compiled),
        )
    return known[id(work)]


def layer_seconds(
    work: LayerWork,
    device: Device,
    dtype: str,
    *,
    is_frozen: bool = False,
    is_compiled: bool = False,
) -> tuple[float, float]:
    """Return seconds of a layer's forward and backward, without recomputation.

    A product takes its FLOP over the rate that products sustain, and a latency: small ones run
    slower. Attention's rate goes by kernel, pass and length. A GPU's kernels are launched ahead,
    and bound only where launching takes longer than they do; on a CPU every operation's own cost
    is added.

    Args:
        work: Its forward.
        device: What computes it.
        dtype: Of weights and activations.
        is_frozen: Whether its weights get no gradients, so that backward has one product for each
            of forward's and not two.
        is_compiled: Whether its kernels are launched by compiled code.

    Raises:
        ConfigError: The device's peak for the dtype is not known.
    """
    if dtype not in device.flops:
        raise ConfigError(
            f"{device.name} has no peak for {dtype}: it has {', '.join(device.flops)}"
        )
    moved = work.elementwise_bytes
    forward = _seconds(work, device, dtype, 1.0, moved.forward)
    forward += _attention_seconds(work, device, dtype)
    attention = _attention_seconds(work, device, dtype, is_backward=True)
    attention *= _KEPT_ATTENTION_BACKWARD if work.keeps_scores else _ATTENTION_BACKWARD
    products = 1.0 if is_frozen else 2.0
    backward = _seconds(work, device, dtype, products, moved.backward) + attention
    backward *= device.backward_factor.value
    if device.gradient_bandwidth is not None and not is_frozen:
        backward += work.weight_bytes / device.gradient_bandwidth.value
    launches = launch_seconds(work, device, is_frozen=is_frozen, is_compiled=is_compiled)
    if device.is_cpu:
        return forward + launches[0], backward + launches[1]
    return max(forward, launches[0]), max(backward, launches[1])


def _attention_seconds(
    work: LayerWork, device: Device, dtype: str, *, is_backward: bool = False
) -> float:
    """Return the seconds of forward's products of attention, at either pass's rate."""
    rate = device.attention_rate(
        dtype, is_backward=is_backward, is_native=work.is_native, tokens=work.attention_tokens
    )
    return work.attention_flop / (rate * work.attention_share)


def launch_seconds(
    work: LayerWork, device: Device, *, is_frozen: bool = False, is_compiled: bool = False
) -> tuple[float, float]:
    """Return the seconds in which a layer's kernels are launched, forward and backward.

    Args:
        work: Its forward.
        device: What computes it.
        is_frozen: Whether its weights get no gradients.
        is_compiled: Whether its kernels are launched by compiled code.
    """
    launch = device.launch
    backward_launch = device.backward_launch or launch
    if is_compiled and device.compiled_launch is not None:
        launch = backward_launch = device.compiled_launch
    num_backward = 2.0 * work.num_kernels - (work.num_matmuls if is_frozen else 0)
    return work.num_kernels * launch.value, num_backward * backward_launch.value


def _seconds(
    work: LayerWork, device: Device, dtype: str, times: float, elementwise_bytes: float
) -> float:
    """Return the seconds of a pass: a layer's products so many times, and elementwise bytes.

    A product's reads and writes hide behind its FLOP, or bind.
    """
    rate = device.product_rate(dtype)
    bandwidth = device.bandwidth.value * device.bandwidth_efficiency.value
    from_memory = 1.0 - 0.5 * device.cached(work.tensor_bytes)  # half of what moves is read
    moved = work.weight_bytes + work.product_bytes * from_memory
    products = times * max(work.matmul_flop / rate, moved / bandwidth)
    products += times * work.num_matmuls * device.matmul_latency.value
    return products + elementwise_bytes * from_memory / bandwidth


def layers_of(costs: StepCosts) -> list[list[int]]:
    """Return the indices of each layer's segments, in the order of forward."""
    names = [segment.layer or segment.name for segment in costs.segments]
    return [list(group) for _, group in groupby(range(len(names)), key=names.__getitem__)]
