"""Parts of a memory need: those of a device by the part of a step that needs them.

Also the parts that systems other than the engine have in common: each system's own parts are in
its schedule's file. Each device of several updates an equal part of the model, so that all hosts
together hold it once; weights are whole on every device, but where a system shards them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from sim.hardware.profile import HardwareProfile
from sim.models.workload import Workload

FLOAT_BYTES = 4
STATE_BYTES = 3 * FLOAT_BYTES
"""Bytes of an element's optimizer state: master and two moments in float32."""
REDUCE_BUCKET = 500_000_000
"""Elements of DeepSpeed's default ``reduce_bucket_size``, one contiguous buffer without
``overlap_comm``."""
DOUBLE_BYTES = 8
ACTIVATION_BUFFERS = 2
"""Number of layers whose activations the device holds on their way to the host or back."""

PartPlace = Literal["device", "pageable", "pinned", "nvme"]
PLACES: tuple[PartPlace, ...] = ("device", "pageable", "pinned", "nvme")


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes with one purpose in one place."""

    name: str
    place: PartPlace
    num_bytes: float
    """Bytes of one device; on one host or its drives bytes of all its devices."""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceParts:
    """Memory of one device, activations aside, by the part of a step that needs it."""

    always: Sequence[Part]
    """Parts that it holds throughout a step."""
    passes: Sequence[Part] = ()
    """Parts that it holds in forward and backward alone."""
    step: Sequence[Part] = ()
    """Parts that it holds only while it takes the optimizer's step."""
    gradients_before: float = 0.0
    """Bytes of gradients before the last micro-batch's backward."""
    in_flight: float
    """Bytes of gradients that backward holds at a time, where all leave at once."""
    gradients_after: float
    """Bytes of gradients when backward ends."""
    gradients_at_step: float | None = None
    """Bytes of gradients that the step still needs; None is all there are when backward ends."""
    copy_of_largest: float = 0.0
    """Bytes of a copy in higher precision that the largest gradient takes while it leaves."""
    trains_tables: bool = True
    """Whether embeddings and output layers get gradients."""
    logits_share: float = 1.0
    """Share of a micro-batch's tokens whose logits are there at a time, unless the loss makes
    them in chunks of its own."""
    layer_activations: float = 0.0
    """Bytes by which what a whole layer keeps differs from what it keeps in full training."""


SystemParts = tuple[DeviceParts, list[Part]]
"""Parts of one device, and parts of the host and its drives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemCase:
    """A system's workload and machine, from which its memory follows."""

    workload: Workload
    hardware: HardwareProfile
    options: Mapping[str, Any]
    """Every option of the system's schedule."""

    @property
    def size(self) -> int:
        """Bytes of an element of the model."""
        return self.workload.dtype_bytes

    @property
    def width(self) -> int:
        """Bytes of an element of what AdamW updates: a float32 master, or the model's weight."""
        return FLOAT_BYTES if self.options.get("float32_master", True) else self.size

    @property
    def state_bytes(self) -> int:
        """Bytes of an element's optimizer state: two moments, and a master if there is one."""
        return (3 if self.size < self.width else 2) * self.width

    @property
    def params(self) -> float:
        """Number of elements of the model."""
        return float(self.workload.num_params)

    @property
    def count(self) -> int:
        """Number of devices of one host."""
        return self.hardware.num_devices

    @property
    def total(self) -> int:
        """Number of devices of all hosts."""
        return self.hardware.total_devices

    @property
    def hosted(self) -> float:
        """Number of elements whose home is one host: an equal part of the model."""
        return self.params / self.hardware.num_hosts

    @property
    def in_flight(self) -> float:
        """Bytes of gradients while they leave: one layer's, and the next one's behind it."""
        largest = max(layer.numel for layer in self.workload.distinct_layers)
        return min(self.params, 2.0 * largest) * self.size

    def device(
        self, *more: Part, in_flight: float | None = None, after: float | None = None
    ) -> DeviceParts:
        """Return the parts of a device that holds all weights.

        Args:
            more: Parts beside the weights.
            in_flight: Bytes of gradients in backward; None is `SystemCase.in_flight`.
            after: Bytes of gradients when it ends; None is the same.
        """
        leaving = self.in_flight if in_flight is None else in_flight
        whole = self.params * self.size
        return DeviceParts(
            always=[Part("weights", "device", whole), *more],
            in_flight=leaving,
            gradients_before=whole if self.workload.accumulation > 1 else 0.0,
            gradients_after=leaving if after is None else after,
        )

    @property
    def largest(self) -> int:
        """Number of elements of the largest parameter."""
        return max(parameter.numel for parameter in self.workload.parameters)

    @property
    def largest_inner(self) -> int:
        """Number of elements of the largest parameter of the layers between the tables."""
        inner = [layer for layer in self.workload.distinct_layers if layer.is_inner]
        return max((p.numel for layer in inner for p in layer.parameters), default=0)

    def deepspeed_device(
        self, *more: Part, buckets: int = 1, takes_norms: bool = False
    ) -> DeviceParts:
        """Return the parts of a device under DeepSpeed, ZeRO stage 2 with offload.

        Gradients are reduced in a bucket and leave with every micro-batch, so none is kept whole.

        Args:
            more: Parts beside the weights.
            buckets: Number of buckets, each of DeepSpeed's default size.
            takes_norms: Whether each gradient's norm is taken before it leaves, on a copy in
                float64 (deepspeed/runtime/zero/stage_1_and_2.py,
                `set_norm_for_param_grad_in_gpu`). The float32 copy that leaves is half as large,
                and comes after that one. A device takes the part of the tensor that it updates.
        """
        bucket = REDUCE_BUCKET * self.size
        leaving, copy = min(self.in_flight, bucket) + buckets * bucket, 0.0
        if takes_norms:
            own = self.params / self.total
            leaving += DOUBLE_BYTES * min(self.largest_inner, own)
            copy = DOUBLE_BYTES * (min(self.largest, own) - min(self.largest_inner, own))
        largest = self.largest * self.size
        adding = Part("gradient to add to", "device", largest, "of the largest parameter")
        device = self.device(*more, adding, in_flight=leaving)
        return replace(device, gradients_before=0.0, copy_of_largest=copy)

    def pinned(self, name: str, bytes_each: float, *, together: float = math.inf) -> list[Part]:
        """Return pinned buffers of each device's part of the model, with their rounding.

        Args:
            name: What they hold.
            bytes_each: Bytes of an element.
            together: Elements of one buffer at most.
        """
        share = self.params / self.total
        whole, rest = divmod(share, together) if together < share else (0.0, share)
        taken = whole * rounded(min(share, together) * bytes_each) + rounded(rest * bytes_each)
        return [
            Part(name, "pinned", self.count * share * bytes_each),
            Part(
                f"rounding of {name}", "pinned", self.count * (taken - share * bytes_each),
                "to a power of two",
            ),
        ]  # fmt: skip

    def offloaded(self, *, gradient_buffers: int = 1) -> list[Part]:
        """Return the host's parts with all state there: 16 bytes in 16 bits (Ren et al. 2021)."""
        return [
            Part("optimizer state", "pageable", STATE_BYTES * self.hosted, "masters, moments"),
            Part("gradients", "pinned", gradient_buffers * self.size * self.hosted),
            Part("weights to upload", "pinned", self.size * self.hosted),
        ]


def zero_offload_parts(case: SystemCase) -> SystemParts:
    """Return the parts of a system that keeps all state on the host."""
    return case.device(), case.offloaded()


def rounded(num_bytes: float) -> int:
    """Return the bytes that torch's pinned allocator takes: the next power of two.

    >>> [rounded(n) for n in (0, 1, 4096, 4097)]
    [0, 1, 4096, 8192]
    """
    whole = math.ceil(num_bytes)
    return 1 << (whole - 1).bit_length() if whole else 0


def gib(num_bytes: float) -> str:
    """Return a size to three digits.

    >>> [gib(n) for n in (3.2e12, 13.3e9, 2.5e8, 1000)]
    ['2.91 TiB', '12.4 GiB', '238 MiB', '0.977 KiB']
    """
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB")):
        if num_bytes >= 1 << power:
            size = num_bytes / (1 << power)
            return f"{size:.0f} {unit}" if size >= 100 else f"{size:.3g} {unit}"
    return f"{num_bytes / 1024:.3g} KiB"
