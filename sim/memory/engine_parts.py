"""Memory parts of the engine: of one device, and of a host for its devices."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sim.hardware.profile import HardwareProfile
from sim.machine import Rates
from sim.memory.engine import EngineMemory
from sim.memory_parts import DeviceParts, Part, SystemCase
from sim.models.workload import Workload
from sim.schedules.parallel.fsdp import sharded_device
from sim.schedules.streams import Streams
from sim.simulate import Strategy
from sim.timing.costs import costs_of
from zenflow.rule.sizes import FRESH_ELEMENTS, PASSING_BYTES, PIECES, STREAMED_ELEMENTS

_FLOAT = 4
"""Bytes of an element of float32."""


def engine_device_parts(
    workload: Workload, strategy: Strategy, own: EngineMemory, hardware: HardwareProfile
) -> DeviceParts:
    """Return a device's parts of the engine; under DDP all but the host's are whole on each."""
    size, count = workload.dtype_bytes, hardware.total_devices
    if strategy.division(hardware).device > 1:
        return _sharded_engine_parts(workload, strategy, own, hardware)
    if strategy.releases and count > 1:
        return _averaged_engine_parts(workload, own, hardware)
    releases = strategy.releases
    has_ring = releases and not hardware.device.is_cpu
    whole = float(workload.num_params * size)
    in_flight, after = 2.0 * own.bucket * size, whole
    at_step: float | None = None
    if releases and hardware.device.is_cpu:
        leaving = own.deferred * size
        waiting = leaving * _share_that_waits(workload, hardware, own.sent)
        after = (own.important + own.resident) * size + min(leaving, in_flight + waiting)
    elif releases:  # a bucket's gradients are packed into the ring and freed before the next's
        in_flight = float(
            max(own.bucket, *(layer.numel for layer in workload.distinct_layers)) * size
        )
        at_step = float((own.important + own.resident) * size)
        after = min(whole, at_step + in_flight)
    weights = Visiting.of(workload, strategy.streams)
    return DeviceParts(
        always=[
            Part("weights", "device", whole - weights.at_home),
            Part("visiting weights", "device", weights.on_device, "of layers that are streamed"),
            *_engine_state(own, hardware, has_ring=has_ring, size=size),
            Part("reduction buckets", "device", whole if count > 1 else 0.0, "DDP's default"),
        ],
        in_flight=min(whole, in_flight),
        # Gradients of earlier micro-batches stay until the last one has been added.
        gradients_before=whole - weights.sums_at_home if workload.accumulation > 1 else 0.0,
        gradients_after=after,
        gradients_at_step=at_step,
        step=_engine_step(own, size, releases=releases),
    )


@dataclass(frozen=True, slots=True)
class Visiting:
    """Bytes of a model whose layers visit the device."""

    at_home: float = 0.0
    """Bytes of all streamed weights, in pinned host memory."""
    on_device: float = 0.0
    """Bytes of the largest number of layers that visit at a time."""
    sums_at_home: float = 0.0
    """Bytes of sums of gradients that are at home while two layers' are on the device."""

    @classmethod
    def of(cls, workload: Workload, streams: Streams | None) -> Visiting:
        """Return the bytes of a model; nothing visits where there are no streams.

        Raises:
            ConfigError: The model has fewer layers than are to stay.
        """
        if streams is None:
            return cls()
        least = STREAMED_ELEMENTS
        sizes = [
            workload.dtype_bytes
            * sum(p.numel for p in layer.parameters if len(p.shape) > 1 and p.numel >= least)
            for layer in (workload.layers[index] for index in streams.visiting(workload.layers))
        ]
        largest = sorted(sizes, reverse=True)
        return cls(
            float(sum(sizes)), float(sum(largest[: streams.slots])), float(sum(largest[2:]))
        )


def _averaged_engine_parts(
    workload: Workload, own: EngineMemory, hardware: HardwareProfile
) -> DeviceParts:
    """Return a device's parts of the engine in release mode under DDP.

    DDP's buckets hold all gradients, as `gradient_as_bucket_view` has it: beside them there is one
    on its way there, and what has been taken of them. Earlier micro-batches, whose gradients are
    not averaged, add up outside.
    """
    size, is_cpu = workload.dtype_bytes, hardware.device.is_cpu
    whole = float(workload.num_params * size)
    arriving = float(max(parameter.numel for parameter in workload.parameters) * size)
    important = float(own.important * size)
    copies = 0.0
    if is_cpu:  # which has no ring: what the link has not sent yet was copied out of the buckets
        share = _share_that_waits(workload, hardware, own.sent)
        copies = max(own.bucket, share * own.split) * size
    return DeviceParts(
        always=[
            Part("weights", "device", whole),
            *_engine_state(own, hardware, has_ring=not is_cpu, size=size),
            Part("reduction buckets", "device", whole, "all gradients"),
        ],
        in_flight=arriving + copies,
        gradients_before=whole if workload.accumulation > 1 else 0.0,
        gradients_after=arriving + important + copies,
        gradients_at_step=important + copies,
        step=_engine_step(own, size, releases=True),
    )


def _sharded_engine_parts(
    workload: Workload, strategy: Strategy, own: EngineMemory, hardware: HardwareProfile
) -> DeviceParts:
    """Return a device's parts of the engine under FSDP2: its rows of everything."""
    size = workload.dtype_bytes
    case = SystemCase(workload=workload, hardware=hardware, options={})
    # A CPU's gradients just wait, and have no ring.
    has_ring = strategy.releases and not hardware.device.is_cpu
    device = sharded_device(
        case,
        *_engine_state(own, hardware, has_ring=has_ring, size=size),
        reshards=strategy.reshards,
    )
    step = _engine_step(own, size, releases=strategy.releases)
    if not has_ring:
        return replace(device, step=step)
    # The last full bucket waits for its norms.
    kept = float((own.important + own.resident + own.bucket) * size)
    after = device.in_flight + kept
    return replace(device, gradients_after=after, gradients_at_step=kept, step=step)


def _engine_state(
    own: EngineMemory, hardware: HardwareProfile, *, has_ring: bool, size: int
) -> list[Part]:
    """Return the parts that the engine keeps on a device throughout."""
    temporaries = 0.0
    if not hardware.device.is_cpu:
        # Updates arrive by pieces of the ring, or as large as others may be.
        landing = min(own.block * size, max(PASSING_BYTES, own.ring / PIECES))
        packing = 0.0 if has_ring else own.block * size
        temporaries = packing + landing
        if own.host.config.is_exact:  # a fresh step of each, in float32
            temporaries += _FLOAT * (landing / size + min(FRESH_ELEMENTS, own.bucket))
        if own.host.config.is_factored:  # gradients that are divided by roots
            temporaries += own.bucket * size
    return [
        Part("optimizer state", "device", own.device_state, "important columns, whole tensors"),
        Part("column vectors", "device", own.column_vectors, "scores, moments, indices"),
        Part("rings", "device", own.ring if has_ring else own.packed, "packed gradients"),
        Part("gathered columns", "device", own.gathered, "of all hosts, on their way to weights"),
        Part("updates' temporaries", "device", temporaries, "of a piece that lands"),
    ]


def _engine_step(own: EngineMemory, size: int, *, releases: bool) -> list[Part]:
    """Return the parts that the engine needs on a device at the step alone."""
    return [
        Part("float32 gradients", "device", own.float_gradients, "of whole tensors"),
        Part("update's temporaries", "device", own.bank_temporaries, "of one bank of columns"),
        Part("important gradients", "device", 0.0 if releases else float(own.important * size)),
    ]


def engine_host_parts(
    own: EngineMemory, count: int, weights: Visiting, accumulation: int
) -> list[Part]:
    """Return a host's parts of the engine for so many devices.

    Args:
        own: The engine's need for one device.
        count: Number of devices.
        weights: Weights that visit a device.
        accumulation: Number of micro-batches in a step.
    """
    sums = weights.at_home if accumulation > 1 else 0.0
    on_drive = 0.0 if own.host.drive is None else float(count * own.host.drive.file_bytes)
    return [
        Part("streamed weights", "pinned", count * weights.at_home, "which visit the device"),
        Part("gradients' sums", "pinned", count * sums, "of streamed weights"),
        Part("optimizer state", "pageable", count * own.host.state, "masters, moments"),
        Part("optimizer state", "nvme", on_drive, "masters, moments, two places of each"),
        Part("drive buffers", "pageable", count * own.host.buffers, "through which states pass"),
        Part("sums", "pageable", count * own.host.sums, "of windows' gradients"),
        Part("step counts", "pageable", count * own.host.steps),
        Part("gradient staging", "pinned", count * own.host.staging),
        Part("waiting gradients", "pinned", count * own.pool, f"up to {own.depth} of a column"),
        Part("upload buffers", "pinned", count * own.uploads),
        Part("weights of training", "pageable", count * own.training_weights, "under eval()"),
    ]


def _share_that_waits(workload: Workload, hardware: HardwareProfile, num_bytes: float) -> float:
    """Return the share of the gradients that still waits when backward has ended, on a CPU."""
    seconds = num_bytes / Rates.of(hardware).d2h
    if not seconds:
        return 0.0
    return max(0.0, 1.0 - costs_of(workload, hardware).backward_seconds / seconds)
