"""A hardware profile from what was measured on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from experiments.calibration.compute import ComputeFit, fit_compute, forwards_of
from experiments.calibration.link import LinkRates
from experiments.calibration.parts import HostRates
from sim.fitting.device import ComputeTimes, DeviceFit, fit_device
from sim.fitting.fit import Fit
from sim.fitting.refine import Observation
from sim.hardware.components import Device, EngineOverheads, Host, Link
from sim.hardware.file import KERNEL_IS_DRAM
from sim.hardware.quantity import Quantity
from sim.hardware.unknown import gpu_like
from zenflow.host.limits import usable_cores
from zenflow.provenance import hardware

_ENDLESS = 1e13
"""Bytes/s, or parameters/s, of what is too fast to be seen."""
_LEAST_SECONDS = 1e-9
_CPU_OVERHEADS = {"host_task": 50e-6, "copy": 100e-6, "bucket": 100e-6, "step": 1e-3}
_GPU_OVERHEADS = {"host_task": 30e-6, "copy": 15e-6, "bucket": 2e-4, "step": 5e-4}


def measured(value: float, what: str) -> Quantity:
    """Return a figure of this machine."""
    return Quantity(value=value, kind="measured", source=what)


def assumed(value: float, why: str) -> Quantity:
    """Return a figure that was not measured."""
    return Quantity(value=value, kind="estimated", source=why)


def fitted_device(
    device: torch.device,
    times: Sequence[ComputeTimes],
    dtype: str,
    runs: Sequence[Observation] = (),
) -> DeviceFit:
    """Return a device as its passes tell it.

    Args:
        device: A GPU, or the CPU in its role.
        times: Passes of models by themselves.
        dtype: Of all passes.
        runs: Runs whose forward was measured.
    """
    if device.type == "cpu":
        compute = fit_compute(times, runs)
        return DeviceFit(cpu_of(compute, dtype), compute.fit.residuals)
    found = torch.cuda.get_device_properties(device)
    start = gpu_like(found.name, (found.major, found.minor))
    memory = measured(float(found.total_memory), "as the system says")
    start = replace(start, name=found.name, memory=memory)
    return fit_device(start, [*times, *forwards_of(runs)])


def cpu_of(compute: ComputeFit, dtype: str) -> Device:
    """Return the CPU in a device's role, by the fit of passes in a dtype."""
    constants = compute.fit
    rate = constants.rate("matmul", 1e16)
    source = "fit to forward and backward of decoders"
    found = hardware()

    def launches(*names: str) -> Quantity:
        fitted = sum(constants.constants.get(name, 0.0) for name in names)
        return measured(max(_LEAST_SECONDS, fitted), source)

    return Device(
        name=str(found["cpu"]),
        is_cpu=True,
        memory=measured(float(found["memory_bytes"]), "as the system says"),
        flops={dtype: measured(rate, source)},
        matmul_efficiency=assumed(1.0, "part of the fitted rate"),
        matmul_latency=assumed(_LEAST_SECONDS, "part of launch"),
        attention_efficiency=measured(min(1.0, constants.rate("attention", rate) / rate), source),
        bandwidth=measured(constants.rate("elementwise", _ENDLESS * 10), source),
        bandwidth_efficiency=assumed(1.0, "part of the fitted rate"),
        launch=launches("launch", "launch in a run"),
        backward_factor=measured(compute.backward_factor, source),
        backward_launch=launches("backward launch"),
        gradient_bandwidth=measured(constants.rate("gradient", _ENDLESS * 10), source),
    )


def link_of(rates: LinkRates | None) -> Link:
    """Return the link; a CPU that plays the device has none of its own."""
    if rates is None:
        unpaced = assumed(_ENDLESS, "no link: copies are memory copies, bound by packing")
        return Link(
            name="none",
            d2h=unpaced,
            h2d=unpaced,
            duplex=assumed(1.0, "two threads"),
            pageable=assumed(1.0, "a CPU pins nothing"),
            latency=assumed(_LEAST_SECONDS, "no link"),
        )
    latency = max(rates.d2h.constants["call"], rates.h2d.constants["call"], _LEAST_SECONDS)
    return Link(
        name="measured",
        d2h=measured(rates.d2h.rate("byte", _ENDLESS), "pinned copies of 1 to 256 MiB, alone"),
        h2d=measured(rates.h2d.rate("byte", _ENDLESS), "pinned copies of 1 to 256 MiB, alone"),
        duplex=measured(rates.duplex, "pinned copies both ways at once"),
        pageable=measured(rates.pageable, "pageable copies of 1 to 256 MiB"),
        latency=measured(latency, "fit to copies of 1 to 256 MiB"),
    )


def host_of(rates: HostRates, sharing: float, memory: float) -> Host:
    """Return the host part of this machine's profile."""
    return Host(
        name=str(hardware()["cpu"]),
        sockets=1,
        cores=usable_cores(),
        dram=measured(max(rates.by_threads.values()), "the host kernel on all its threads"),
        dram_bytes=measured(memory, "as the system says"),
        core_bandwidth=measured(
            rates.by_threads[1], "the host kernel on one thread, a gradient a pass"
        ),
        numa_hop=assumed(1.0, "taken as one socket"),
        core_sharing=measured(sharing, "compute beside the host kernel"),
        adam_share=KERNEL_IS_DRAM,
        core_update=measured(rates.steps, "the host kernel on one thread, many gradients a pass"),
        compact_coding=measured(rates.coding, "passes over compact and float32 state"),
    )


def overheads_of(parts: Mapping[str, Fit], *, is_cpu: bool) -> EngineOverheads:
    """Return the engine's parts; what hand-overs take is for runs to refine."""
    fixed = _CPU_OVERHEADS if is_cpu else _GPU_OVERHEADS

    def rate(part: str, unit: str, what: str) -> Quantity:
        return measured(parts[part].rate(unit, _ENDLESS), what)

    return EngineOverheads(
        **{name: assumed(value, "a start for runs to refine") for name, value in fixed.items()},
        select=measured(_LEAST_SECONDS, "runs with selections beside runs without"),
        intake_bandwidth=rate("intake", "byte", "energies and gathering, by matrix size"),
        pack_bandwidth=rate("pack", "byte", "packing nine columns in ten, by matrix size"),
        unpack_bandwidth=rate("unpack", "byte", "writing nine columns in ten back"),
        device_update=rate("whole", "parameter", "AdamW on whole matrices, by matrix size"),
        column_update=rate("columns", "parameter", "AdamW on one column in ten, by matrix size"),
    )
