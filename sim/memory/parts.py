"""Parts of a memory need, and the moment of a step at which a device holds most."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sim.models.workload import Workload

PartPlace = Literal["device", "pageable", "pinned", "nvme"]
PLACES: tuple[PartPlace, ...] = ("device", "pageable", "pinned", "nvme")


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes with one purpose in one place."""

    name: str
    place: PartPlace
    num_bytes: float
    """Bytes of one device; on the host or its drives bytes of all devices."""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceParts:
    """What one device holds, activations aside."""

    always: Sequence[Part]
    """Parts that it holds throughout a step."""
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


def fullest(workload: Workload, device: DeviceParts) -> tuple[str, list[Part]]:
    """Return the moment of a step at which a device is fullest, and what it holds then.

    In backward activations go as gradients come, at about the same rate, so that one of its two
    ends is fullest.
    """
    kept = workload.activation_bytes()
    whole, layer = sum(kept[:-1]), max(kept[:-1], default=0.0)
    before, after = device.gradients_before, device.gradients_after
    at_step = after if device.gradients_at_step is None else device.gradients_at_step
    inside = [
        Part("recomputed layer", "device", workload.recomputed_bytes()),
        Part("activations' gradients", "device", workload.working_bytes(), "of one layer"),
    ]
    moments = {
        "loss": [
            Part("activations", "device", whole),
            Part("logits and loss", "device", kept[-1] + workload.loss_bytes()),
            Part("gradients", "device", before),
        ],
        "start of backward": [
            Part("activations", "device", whole),
            Part("gradients", "device", max(before, min(after, device.in_flight))),
            *inside,
        ],
        "end of backward": [
            Part("activations", "device", layer),
            Part("gradients", "device", after),
            Part(
                "tied table's gradients", "device", workload.tied_bytes(), "before they are added"
            ),
            *inside,
        ],
        "step": [Part("gradients", "device", at_step), *device.step],
    }
    totals = {name: sum(part.num_bytes for part in parts) for name, parts in moments.items()}
    moment = max(totals, key=totals.__getitem__)
    return moment, [*device.always, *moments[moment]]


def rounded(num_bytes: float) -> int:
    """Return what torch's pinned allocator takes for so many bytes: the next power of two.

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
