"""Moments of a step: parts that a device holds at each, and the one at which it is fullest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sim.memory_parts import ACTIVATION_BUFFERS, DeviceParts, Part
from sim.models.activations import Activations
from sim.models.workload import Workload

Moments = Mapping[str, Sequence[Part]]
"""Parts that a device holds at each moment of a step, beside those that it always does."""


def fullest(
    workload: Workload, device: DeviceParts, held: Moments | None = None
) -> tuple[str, list[Part]]:
    """Return the moment of a step at which a device is fullest, and what it holds then.

    In backward activations go as gradients come, at about the same rate, so that one of its two
    ends is fullest.

    Args:
        workload: Step of one device.
        device: Parts of the device.
        held: `moments_of` both, where that is known.
    """
    held = held or moments_of(workload, device)
    moment = max(held, key=lambda name: _sum(held[name]))
    return moment, [*device.always, *held[moment]]


def cached_bytes(workload: Workload, device: DeviceParts, held: Moments) -> float:
    """Return the bytes that the allocator holds at most beyond those of the fullest moment.

    Blocks that no later tensor fits are counted. They are given back before memory runs out.
    """
    counts = Activations(workload)
    share = 1.0 if counts.chunks_logits else device.logits_share
    most = max(map(_sum, held.values()))
    return max(0.0, _sum(held["loss"]) + share * counts.idle_bytes() - most)


def _sum(parts: Sequence[Part]) -> float:
    return sum(part.num_bytes for part in parts)


def moments_of(workload: Workload, device: DeviceParts) -> Moments:
    """Return the parts that a device holds at each moment, beside those that it always does."""
    moments = _passes(Activations(workload), device)
    held = {name: [*device.passes, *parts] for name, parts in moments.items()}
    after, at_step = device.gradients_after, device.gradients_at_step
    gradients = Part("gradients", "device", after if at_step is None else at_step)
    held["step"] = [gradients, *device.step]
    return held


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
        # An output layer's gradient comes before any layer is recomputed.
        "largest gradient leaves": [
            Part("activations", "device", whole),
            buffers,
            Part("gradients", "device", min(before + device.in_flight, max(before, after))),
            Part("gradient's copy", "device", device.copy_of_largest, "in higher precision"),
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
