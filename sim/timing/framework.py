"""Framework: overheads of PyTorch's and DeepSpeed's own code around layers and optimizer steps.

- Seconds of the host were measured by ``evidence/benchmarks/framework_hooks.py``, with tiny
  parameters on a CPU and collectives that do nothing (records
  2026-11-25_framework-hooks_intel-r-xeon-r-processor
  and, for ZeRO-3, 2026-11-25_framework-hooks_amd-epyc). None comes from the time of a training
  step.
- Kernels and bytes are counted in the code: torch 2.13 (torch/distributed/fsdp/_fully_shard,
  torch/csrc/distributed/c10d/reducer.cpp, torch/optim/adam.py), DeepSpeed 0.19.6
  (deepspeed/runtime/zero/stage_1_and_2.py).
- A kernel that plain code launches, with no module around it, costs what a compiled layer's does.

All overheads are added to costs that come from shapes or a trace: given phases include them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from sim.hardware.components import Device
from sim.timing.costs import StepCosts, layers_of
from zenflow.config import unknown_name
from zenflow.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """Work of a framework around one layer in one pass, beside the layer's own kernels."""

    unit: float = 0.0
    """Seconds of the host for each layer, however large."""
    parameter: float = 0.0
    """Seconds of the host for each of the layer's parameters."""
    unit_kernels: int = 0
    """Number of kernels for each layer, however large."""
    parameter_kernels: int = 0
    """Number of kernels for each of the layer's parameters."""
    moved: float = 0.0
    """Bytes of device memory read and written for each of the layer's elements."""
    unit_matrices: int = 0
    """Number of matrices of the layer around which ``unit`` was measured, where each module has
    hooks: a layer of more takes longer in proportion. 0 where a layer's count does not matter."""

    def host_seconds(self, num_parameters: int, num_matrices: int, device: Device) -> float:
        """Return the seconds of the host for a layer with so many parameters and matrices."""
        kernels = self.unit_kernels + num_parameters * self.parameter_kernels
        times = max(1.0, num_matrices / self.unit_matrices) if self.unit_matrices else 1.0
        seconds = times * self.unit + num_parameters * self.parameter
        return seconds + kernels * plain_launch_seconds(device)


def plain_launch_seconds(device: Device) -> float:
    """Return the seconds of a kernel that plain code launches."""
    return (device.compiled_launch or device.backward_launch or device.launch).value


def is_added(costs: StepCosts) -> bool:
    """Return whether an optimizer's launches are added to costs.

    Phases that were given have them already, and so has what calibration finds of a CPU.
    """
    return costs.workload is not None and not costs.hardware.device.is_cpu


def with_hooks(costs: StepCosts, in_forward: Hooks, in_backward: Hooks) -> StepCosts:
    """Return the costs with hooks around every layer.

    A layer's pass takes its kernels' time and that of what hooks move, but no less than the host
    takes for launches and hooks. A CPU that plays the device takes both in turn.
    """
    if costs.workload is None:
        return costs
    device, bandwidth = costs.hardware.device, costs.elementwise_bandwidth
    segments = list(costs.segments)
    for layer in layers_of(costs):
        parts = [costs.segments[index] for index in layer]
        numel = sum(part.numel for part in parts)
        count = sum(part.num_parameters for part in parts)
        matrices = sum(len(part.matrices) for part in parts)
        both = in_forward, in_backward
        hosts = [hooks.host_seconds(count, matrices, device) for hooks in both]
        for index, part in zip(layer, parts, strict=True):
            share = part.numel / numel if numel else 1.0 / len(parts)
            ahead = [
                launch + share * host for launch, host in zip(part.launching, hosts, strict=True)
            ]
            moved = [part.numel * hooks.moved / bandwidth for hooks in (in_forward, in_backward)]
            forward, backward = part.forward + moved[0], part.backward + moved[1]
            if device.is_cpu:
                forward, backward = forward + share * hosts[0], backward + share * hosts[1]
            else:
                forward, backward = max(forward, ahead[0]), max(backward, ahead[1])
            segments[index] = replace(
                part, forward=forward, backward=backward, launching=(ahead[0], ahead[1])
            )
    return replace(costs, segments=tuple(segments))


def fsdp2_hooks(costs: StepCosts, *, reshards: bool, reduce_bytes: int) -> StepCosts:
    """Return the costs of layers under FSDP2, one group of parameters each.

    An all-gather is copied into and out of a flat buffer, and so is a reduce-scatter into one: the
    copies out of the first and into the second are of whole layers, on the stream that computes.
    One device runs the same hooks and copies, as under ZeRO-3. The seconds of a layer are those
    around transformers' decoder layer: a module with one input takes a quarter of them.

    Args:
        costs: Of one step.
        reshards: Whether backward gathers again.
        reduce_bytes: Bytes of an element of a reduce-scatter.
    """
    size, gather = costs.dtype_bytes, _gather_bytes(costs)
    again = gather if reshards else 0.0
    return with_hooks(
        costs,
        Hooks(unit=919e-6, parameter=11.8e-6, unit_kernels=3, moved=gather),
        Hooks(unit=1114e-6, parameter=26.5e-6, unit_kernels=6, moved=again + size + reduce_bytes),
    )


def _gather_bytes(costs: StepCosts) -> float:
    """Return the bytes of copies into and out of an all-gather, for each element."""
    return 2.0 * costs.dtype_bytes * (1.0 + 1.0 / costs.hardware.total_devices)


_LLAMA_MATRICES = 7
"""Number of matrices of the layer that the benchmark puts ZeRO-3 around."""


def zero3_hooks(costs: StepCosts) -> StepCosts:
    """Return the costs of layers under DeepSpeed's ZeRO-3, whose modules have hooks each.

    A module's hooks fetch its parameters, look for those of the next ones and release them, on one
    device too. The seconds are those of transformers' Llama layer; one with experts has more
    modules, whose hooks bind its host (deepspeedai/DeepSpeed #6649). In a layer that is recomputed
    the hooks of forward run again. Each parameter is copied out of what was gathered, and its
    gradient into the bucket, where it is divided.
    """
    if costs.workload is None:
        return costs
    layers = sum(layer.is_inner for layer in costs.workload.layers)
    redone = sum(costs.workload.recomputed) / max(1, layers)
    gather, size = _gather_bytes(costs), costs.dtype_bytes
    return with_hooks(
        costs,
        Hooks(unit=2509e-6, unit_matrices=_LLAMA_MATRICES, parameter_kernels=1, moved=gather),
        Hooks(
            unit=2319e-6 + redone * (4967e-6 - 2319e-6),
            unit_matrices=_LLAMA_MATRICES,
            parameter_kernels=3,
            moved=gather + 4.0 * size,
        ),
    )


def ddp_hooks(costs: StepCosts, *, in_buckets: bool = False) -> StepCosts:
    """Return the costs of layers under DDP, whose reducer copies gradients to buckets and back.

    Args:
        costs: Of one step.
        in_buckets: Whether they stay in the buckets (`gradient_as_bucket_view`).
    """
    if costs.hardware.total_devices == 1:
        return costs
    copies = 1 if in_buckets else 2
    moved = 2.0 * copies * costs.dtype_bytes
    return with_hooks(costs, Hooks(), Hooks(parameter_kernels=copies, moved=moved))


def deepspeed_hooks(
    costs: StepCosts,
    *,
    own_bytes: float,
    own_kernels: int,
    bucket_elements: int,
) -> StepCosts:
    """Return the costs of layers under DeepSpeed's ZeRO stages 1 and 2.

    Each gradient is copied into a bucket, which is divided and reduced to all devices. One that
    several devices have parts of is copied to a flat tensor first, and each copies its part back.

    Args:
        costs: Of one step.
        own_bytes: Bytes that a device moves for each element of its own part in backward.
        own_kernels: Kernels for each parameter of its own part in backward.
        bucket_elements: Elements of a bucket.
    """
    devices, size = costs.hardware.total_devices, costs.dtype_bytes
    moved = 4.0 * size + own_bytes / devices
    if costs.num_params < devices * bucket_elements and devices > 1:
        moved += 2.0 * size * (1.0 + 1.0 / devices)
    return with_hooks(
        costs,
        Hooks(),
        Hooks(parameter=19.6e-6, parameter_kernels=1 + -(-own_kernels // devices), moved=moved),
    )


def non_finite_bytes(size: int) -> float:
    """Return the bytes moved for an element that DeepSpeed looks at for what is not finite.

    `_has_inf_or_nan`: a cast to float32, two tests, their union, a cast, a maximum.
    """
    return (size + 4.0) + 2 * (4.0 + 1.0) + 3.0 + (1.0 + 4.0) + 4.0


def norm_bytes(size: int) -> float:
    """Return the bytes moved for an element of a norm that DeepSpeed takes in float64."""
    return (size + 8.0) + 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerKernels:
    """Kernels and bytes with which PyTorch's AdamW updates parameters.

    Bytes are those of float32; of a narrower type they are fewer in proportion, as gradients,
    moments and temporaries have the parameters' type.
    """

    moved: float
    """Bytes of memory for each element in float32."""
    parameter: float
    """Seconds of the host for each parameter."""
    kernels: int
    """Kernels for each chunk of parameters, or for each parameter."""
    is_chunked: bool = True
    """Whether one kernel takes many parameters."""
    temporaries: int = 0
    """Number of temporary tensors, each as large as those updated at a time."""


OPTIMIZERS: Mapping[str, OptimizerKernels] = {
    # One kernel reads weight, gradient and moments, and writes all but the gradient.
    "fused": OptimizerKernels(moved=28, parameter=2.7e-6, kernels=1),
    # Decay (8), the first moment (12), the second's decay (8) and sum (12), root (8), division
    # (8), epsilon (8), and the step (16).
    # The root is a list of its own.
    "foreach": OptimizerKernels(moved=80, parameter=10.0e-6, kernels=8, temporaries=1),
    # The same, parameter by parameter: the root and its quotient.
    "loop": OptimizerKernels(
        moved=80, parameter=19.3e-6, kernels=8, is_chunked=False, temporaries=2
    ),
}
"""PyTorch's AdamW by name of the implementation; ``foreach`` is its default on a GPU.

DeepSpeed's own Adam is a fused one, but it takes PyTorch's from a training loop that makes it."""

_FLOAT = 4
"""Bytes of an element whose AdamW moves what `OPTIMIZERS` says."""
_CHUNK = 320 * 65536
"""Elements of one multi-tensor kernel: 320 blocks of 65,536 (ATen, MultiTensorApply.cuh)."""
_CHUNK_PARAMETERS = 36
"""Number of parameters of one multi-tensor kernel, where each has four tensors."""


def optimizer_kernels(name: str) -> OptimizerKernels:
    """Return an implementation of AdamW.

    Raises:
        ConfigError: There is none of this name.
    """
    if name not in OPTIMIZERS:
        raise ConfigError(f"optimizer {unknown_name(name, OPTIMIZERS)}")
    return OPTIMIZERS[name]


def optimizer_temporaries(name: str, elements: float, largest: float, width: int) -> float:
    """Return the bytes of device memory that AdamW takes for a while.

    Args:
        name: Key of `OPTIMIZERS`.
        elements: Number of elements that a device updates.
        largest: Number of elements of the largest tensor of them.
        width: Bytes of an element of the parameters that it updates.

    Raises:
        ConfigError: There is no such implementation.
    """
    kernels = optimizer_kernels(name)
    return 1.0 * width * kernels.temporaries * (elements if kernels.is_chunked else largest)


def optimizer_seconds(costs: StepCosts, name: str, devices: int, width: int) -> float:
    """Return the seconds of AdamW over an equal part of the model, or of each of its parameters.

    Args:
        costs: Of one step.
        name: Key of `OPTIMIZERS`.
        devices: Devices that share the elements; every one visits all parameters.
        width: Bytes of an element of the parameters that it updates.

    Raises:
        ConfigError: There is no such implementation.
    """
    kernels, device = optimizer_kernels(name), costs.hardware.device
    elements = costs.num_params / devices
    fused = elements / costs.hardware.overheads.device_update.value
    seconds = fused * kernels.moved / OPTIMIZERS["fused"].moved * width / _FLOAT
    if not is_added(costs):
        return seconds
    count = sum(segment.num_parameters for segment in costs.segments)
    launched = float(count)
    if kernels.is_chunked:
        launched = count / _CHUNK_PARAMETERS + elements / _CHUNK
    launched *= kernels.kernels
    return max(seconds, count * kernels.parameter + launched * plain_launch_seconds(device))
