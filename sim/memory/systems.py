"""What the memory of systems that are not the engine has in common.

Each system's own parts are in its schedule's file. Each device of several updates an equal part of
the model, so that the host holds all of it once; weights are whole on every device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sim.hardware.profile import HardwareProfile
from sim.memory.parts import DeviceParts, Part, rounded
from sim.models.workload import Workload

FLOAT_BYTES = 4
STATE_BYTES = 3 * FLOAT_BYTES
"""Bytes of an element's optimizer state: master and two moments in float32."""
_REDUCE_BUCKET = 500_000_000
"""Elements of DeepSpeed's default ``reduce_bucket_size``, one contiguous buffer without
``overlap_comm``."""

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
    def params(self) -> float:
        """Number of elements of the model."""
        return float(self.workload.num_params)

    @property
    def count(self) -> int:
        """Number of devices."""
        return self.hardware.num_devices

    @property
    def in_flight(self) -> float:
        """Bytes of gradients while they leave: one layer's, and the next one's behind it."""
        largest = max(layer.numel for layer in self.workload.layers)
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

    def deepspeed_device(self, *more: Part) -> DeviceParts:
        """Return the parts of a device under DeepSpeed, which reduces gradients in a bucket."""
        bucket = _REDUCE_BUCKET * self.size
        return self.device(*more, in_flight=min(self.in_flight, bucket) + bucket)

    def pinned(self, name: str, bytes_each: float, note: str = "") -> list[Part]:
        """Return a pinned buffer of each device's part of the model, with its rounding."""
        share = self.params / self.count * bytes_each
        return [
            Part(name, "pinned", self.count * share, note),
            Part(
                f"rounding of {name}", "pinned", self.count * (rounded(share) - share),
                "to a power of two",
            ),
        ]  # fmt: skip

    def offloaded(self, *, gradient_buffers: int = 1) -> list[Part]:
        """Return the host's parts with all state there: 16 bytes in 16 bits (Ren et al. 2021)."""
        return [
            Part("optimizer state", "pageable", STATE_BYTES * self.params, "masters, moments"),
            Part("gradients", "pinned", gradient_buffers * self.size * self.params),
            Part("weights to upload", "pinned", self.size * self.params),
        ]


def zero_offload_parts(case: SystemCase) -> SystemParts:
    """Return the parts of a system that keeps all state on the host."""
    return case.device(), case.offloaded()
