"""Division: how the devices of a run divide the engine's work on one model among them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Parallel = Literal["ddp", "fsdp"]
PARALLELS: tuple[str, ...] = get_args(Parallel)
"""Ways to train on several devices: weights whole on each, or sharded as by FSDP2."""


@dataclass(frozen=True, slots=True)
class Division:
    """Numbers of equal parts; each device has one of each.

    Examples:
        Under FSDP2 eight devices share everything, under DDP the host's work alone.

        >>> Division.of("fsdp", 8), Division.of("ddp", 8)
        (Division(host=8, device=8), Division(host=8, device=1))
    """

    host: int = 1
    """Number of parts of deferred elements: gradients, states, host work and uploads."""
    device: int = 1
    """Number of parts of all else: weights, important columns, measuring and moving."""

    @classmethod
    def of(cls, parallel: str, devices: int) -> Division:
        """Return the division of the work among devices.

        Args:
            parallel: One of `PARALLELS`.
            devices: Number of devices of all hosts.
        """
        return cls(devices, devices if parallel == "fsdp" else 1)
