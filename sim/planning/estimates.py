"""Estimates: what a step takes, to a few per cent and without simulating it.

A step is about as long as the work of its busiest lane; where the device waits for its own update,
as all that follows in turn. It can't be shorter. A search that goes by estimates has to simulate
few settings.
"""

from __future__ import annotations

from sim.machine import Rates
from sim.memory.engine import EngineMemory
from sim.timing.costs import StepCosts
from sim.timing.fresh_steps import measured_bytes, moved_bytes
from sim.timing.host_passes import window_passes
from zenflow.config import ZenFlowConfig


def estimated_seconds(
    costs: StepCosts, config: ZenFlowConfig, own: EngineMemory, *, releases: bool = True
) -> float:
    """Return about what a steady-state step of the engine takes, selections aside.

    Args:
        costs: Of one step of the model on the machine.
        config: The update rule's settings.
        own: The engine's memory under these settings, which says who owns how many elements.
        releases: Whether gradients leave during backward, on one device.
    """
    hardware = costs.hardware
    rates = Rates.of(hardware)
    window, size = config.update_interval, costs.dtype_bytes
    down = float(own.deferred * size)
    up = down / window
    before, at_end = window_passes(config, size, own.depth)
    before *= 1.0 if config.is_exact else costs.intake_factor
    work = (before + at_end) * (own.deferred / window)
    moved = work.num_bytes
    host = max(moved / rates.host, rates.sharing * moved / rates.dram, work.steps / rates.steps)
    keeps = hardware.num_devices > 1 or not releases
    device = _device_seconds(costs, config, own)
    if not keeps and not hardware.device.is_cpu:  # backward packs what it releases
        device += down / hardware.overheads.pack_bandwidth.value
    if not config.overlap_step and window == 1:  # all of it in turn
        copied = down / rates.d2h if keeps else 0.0
        return device + max(copied, host) + up / rates.h2d
    away = costs.accumulation * sum(segment.leaving for segment in costs.segments)
    down, up = down + away, up + away
    link = max(down / rates.d2h, up / rates.h2d, (down + up) / rates.duplex)
    dram = rates.sharing * (moved + down + up) / rates.dram
    if hardware.device.is_cpu:  # copies are bounded by its cores
        dram = 0.0
    return max(device, link, host, dram, _reduce_seconds(costs))


def _device_seconds(costs: StepCosts, config: ZenFlowConfig, own: EngineMemory) -> float:
    overheads = costs.hardware.overheads
    seconds = costs.compute_seconds + overheads.step.value
    seconds += (own.important + own.resident) / overheads.device_update.value
    size = costs.dtype_bytes
    split = own.deferred + own.important
    moved = split * measured_bytes(config, size)
    if config.is_exact and config.overlap_step and own.deferred:  # else only what is not due
        moved += split * moved_bytes(size)
    seconds += moved / costs.elementwise_bandwidth
    return seconds + split * size / overheads.intake_bandwidth.value


def _reduce_seconds(costs: StepCosts) -> float:
    """Return what an all-reduce of all gradients takes."""
    fabric, count = costs.hardware.fabric, costs.hardware.num_devices
    if fabric is None or count == 1:
        return 0.0
    num_bytes = 2.0 * costs.num_params * costs.dtype_bytes * (count - 1) / count
    return num_bytes / fabric.bandwidth.value
