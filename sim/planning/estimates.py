"""Estimates: the seconds of a step, to a few per cent and without simulating it.

A step is about as long as the work of its busiest lane; where the device waits for its own update,
as all that follows in turn. It can't be shorter. A search that goes by estimates has to simulate
few settings.
"""

from __future__ import annotations

import functools

from sim.machine import Machine, Rates, least_seconds
from sim.memory.engine import EngineMemory
from sim.simulate import Strategy
from sim.timing.changed_uploads import is_still, uploaded_bytes
from sim.timing.costs import StepCosts, layers_of
from sim.timing.division import Division
from sim.timing.framework import ddp_hooks, fsdp2_hooks
from sim.timing.fresh_steps import measured_bytes, moved_bytes
from sim.timing.host_passes import window_passes
from zenflow.config import ZenFlowConfig
from zenflow.host_state import gradient_bytes

_passes = functools.lru_cache(maxsize=1024)(window_passes)  # a search asks for few, and often


def with_framework(costs: StepCosts, strategy: Strategy) -> StepCosts:
    """Return the costs of a step with what the framework does around the engine's layers."""
    if strategy.division(costs.hardware).device > 1:
        reduce_bytes = costs.dtype_bytes
        return fsdp2_hooks(costs, reshards=strategy.reshards, reduce_bytes=reduce_bytes)
    return ddp_hooks(costs, in_buckets=strategy.releases)


def estimated_seconds(
    costs: StepCosts, strategy: Strategy, own: EngineMemory, hooked: StepCosts | None = None
) -> float:
    """Return an estimate of a steady step of the engine, seconds, selections aside.

    Args:
        costs: Of one step of the model on the machine.
        strategy: Of the engine.
        own: One device's part of the engine's memory, which says who owns how many elements.
        hooked: The costs `with_framework`, where they are known.
    """
    hardware, config = costs.hardware, strategy.config
    assert config is not None
    rates = Rates.of(hardware)
    window, size = config.update_interval, costs.dtype_bytes
    down = own.deferred * gradient_bytes(config.gradient_link, size)
    up = own.deferred * uploaded_bytes(config, size, own.depth) / window
    coding = hardware.host.compact_coding.value
    before, at_end = _passes(config, size, own.depth, coding=coding)
    before *= 1.0 if config.is_exact else costs.intake_factor
    work = (before + at_end) * (own.deferred / window)
    moved = work.num_bytes
    kept = rates.host_sharing * moved / rates.dram
    host = max(moved / rates.host, kept, work.steps / rates.steps)
    costs = hooked or with_framework(costs, strategy)
    keeps = not strategy.releases
    device = _device_seconds(costs, config, own, strategy.division(hardware))
    if not keeps and not hardware.device.is_cpu:  # backward packs what it releases
        device += own.deferred * size / hardware.overheads.pack_bandwidth.value
    fabric = _collective_seconds(costs, strategy, up)
    if (taken := hardware.device.collective_share) is not None:
        device += taken.value * min(device, fabric)
    if not config.overlap_step and window == 1:  # all of it in turn
        copied = down / rates.d2h if keeps else 0.0
        return max(device, fabric) + max(copied, host) + up / rates.h2d
    away = costs.accumulation * sum(segment.leaving for segment in costs.segments)
    down, up = down + away, up + away
    link = max(down / rates.d2h, up / rates.h2d, (down + up) / rates.duplex)
    dram = kept + rates.sharing * (down + up) / rates.dram
    if hardware.device.is_cpu:  # copies are bounded by its cores
        dram = 0.0
    return max(device, link, host, dram, fabric)


def _device_seconds(
    costs: StepCosts, config: ZenFlowConfig, own: EngineMemory, division: Division
) -> float:
    overheads = costs.hardware.overheads
    seconds = costs.compute_seconds + overheads.step.value
    seconds += own.important / (overheads.column_update or overheads.device_update).value
    seconds += own.resident / overheads.device_update.value
    size = costs.dtype_bytes
    # Under DDP a device has its part of deferred elements, and measures and moves all of them.
    split = own.deferred * division.host / division.device + own.important
    moved = split * measured_bytes(config, size)
    moves = config.is_exact and config.overlap_step and not is_still(config, size)
    if moves and own.deferred:  # else only what is not due
        moved += split * moved_bytes(size)
    seconds += moved / costs.elementwise_bandwidth
    return seconds + split * size / overheads.intake_bandwidth.value


def _collective_seconds(costs: StepCosts, strategy: Strategy, uploaded: float) -> float:
    """Return the seconds of a step's collectives by their bytes alone.

    Args:
        costs: Of one step of the model on the machine.
        strategy: Of the engine.
        uploaded: Bytes that one device uploads in a step.
    """
    machine = Machine(costs.hardware, keeps_spans=False)
    count = costs.hardware.total_devices
    if count == 1:
        return 0.0
    size = costs.num_params * costs.dtype_bytes
    if strategy.division(costs.hardware).device > 1:
        # Two all-gathers or one, and a reduce-scatter, in every micro-batch.
        last = sum(costs.segments[index].numel for index in layers_of(costs)[-1])
        again = size - last * costs.dtype_bytes if strategy.reshards else 0
        num_bytes = float(costs.accumulation * (2 * size + again))
    else:  # an all-reduce of gradients, and an all-gather of what is uploaded
        num_bytes = 2.0 * size + count * uploaded
    moved = num_bytes * (count - 1) / count
    return least_seconds(machine.fabric_kind, moved)
