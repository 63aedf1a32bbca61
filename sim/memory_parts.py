"""Parts of a memory need, and the moment of a step at which a device holds most.

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
from sim.models.activations import Activations
from sim.models.workload import Workload

FLOAT_BYTES = 4
STATE_BYTES = 3 * FLOAT_BYTES
"""Bytes of an element's optimizer state: master and two moments in float32."""
REDUCE_BUCKET = 500_000_000
"""Elements of DeepSpeed's default ``reduce_bucket_size``, one contiguous buffer without
``overlap_comm``."""
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

    def deepspeed_device(self, *more: Part, buckets: int = 1) -> DeviceParts:
        """Return the parts of a device under DeepSpeed, ZeRO stage 2 with offload.

        Gradients are reduced in a bucket and leave with every micro-batch, so none is kept whole.

        Args:
            more: Parts beside the weights.
            buckets: Number of buckets, each of DeepSpeed's default size.
        """
        bucket = REDUCE_BUCKET * self.size
        leaving = min(self.in_flight, bucket) + buckets * bucket
        largest = max(parameter.numel for parameter in self.workload.parameters) * self.size
        adding = Part("gradient to add to", "device", largest, "of the largest parameter")
        return replace(self.device(*more, adding, in_flight=leaving), gradients_before=0.0)

    def pinned(self, name: str, bytes_each: float) -> list[Part]:
        """Return a pinned buffer of each device's part of the model, with its rounding."""
        share = self.params / self.total * bytes_each
        return [
            Part(name, "pinned", self.count * share),
            Part(
                f"rounding of {name}", "pinned", self.count * (rounded(share) - share),
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


def fullest(workload: Workload, device: DeviceParts) -> tuple[str, list[Part]]:
    """Return the moment of a step at which a device is fullest, and what it holds then.

    In backward activations go as gradients come, at about the same rate, so that one of its two
    ends is fullest.
    """
    moments = _passes(Activations(workload), device)
    held = {name: [*device.passes, *parts] for name, parts in moments.items()}
    after, at_step = device.gradients_after, device.gradients_at_step
    gradients = Part("gradients", "device", after if at_step is None else at_step)
    held["step"] = [gradients, *device.step]
    totals = {name: sum(part.num_bytes for part in parts) for name, parts in held.items()}
    moment = max(totals, key=totals.__getitem__)
    return moment, [*device.always, *held[moment]]


def _passes(counts: Activations, device: DeviceParts) -> dict[str, list[Part]]:
    """Return the parts of the passes beside `DeviceParts.passes`, at their fullest moments."""
    whole, layer = _kept(counts, device.layer_activations)
    buffers = Part(
        "activation buffers", "device", ACTIVATION_BUFFERS * max(counts.leaving_bytes())
    )
    share = 1.0 if counts.chunks_logits else device.logits_share
    logits = share * (counts.kept_bytes()[-1] + counts.loss_bytes())
    before, after = device.gradients_before, device.gradients_after
    again = counts.recomputed_bytes()
    inside = [
        Part("recomputed layer", "device", again + device.layer_activations if again else 0.0),
        Part("activations' gradients", "device", counts.gradient_bytes(), "of one layer"),
    ]
    tied = counts.workload.tied_bytes() if device.trains_tables else 0.0
    return {
        "loss": [
            Part("activations", "device", whole),
            buffers,
            Part("logits and loss", "device", logits),
            Part("gradients", "device", before),
        ],
        "start of backward": [
            Part("activations", "device", whole),
            buffers,
            Part("gradients", "device", min(before + device.in_flight, max(before, after))),
            *inside,
        ],
        "end of backward": [
            Part("activations", "device", layer),
            Part("gradients", "device", after),
            Part("tied table's gradients", "device", tied, "before they are added"),
            *inside,
        ],
    }


def _kept(counts: Activations, change: float) -> tuple[float, float]:
    """Return the bytes of kept activations when backward starts, and when it ends.

    Args:
        counts: Activations of what a step computes.
        change: Bytes by which a layer keeps more where it is not recomputed.
    """
    workload, again = counts.workload, counts.workload.recomputed
    whole, layer = sum(counts.kept_bytes()[:-1]), counts.kept_at_the_end()
    whole += change * sum(
        each.is_inner and not redone for each, redone in zip(workload.layers, again, strict=True)
    )
    layer += 0.0 if any(again) else change  # a recomputed layer keeps its input in any case
    return max(0.0, whole - sum(counts.leaving_bytes())), layer


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
