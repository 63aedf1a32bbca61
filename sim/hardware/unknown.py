"""Machines of which nothing is known but their kind: somewhere to start from.

All quantities are estimates for hardware of this decade. Such a profile tells which lane a setting
loads, and not its seconds. Whoever uses one must correct it by measurement.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from sim.hardware.catalog import find_device, find_machine
from sim.hardware.components import CORE_UPDATE, Device, EngineOverheads, Host, Link
from sim.hardware.profile import HardwareProfile
from sim.hardware.quantity import Quantity
from zenflow.errors import ConfigError

SIGMA = 1.0
"""Log-normal spread of a generic quantity: a factor of e is no surprise."""


def generic_cpu(cores: int, memory_bytes: float) -> HardwareProfile:
    """Return a CPU that plays the device beside the host's worker, on its own cores.

    Args:
        cores: Hardware threads that the process may use.
        memory_bytes: Of the machine.

    Raises:
        ConfigError: A number is not positive.

    Examples:
        >>> generic_cpu(cores=2, memory_bytes=8e9).device.is_cpu
        True
    """
    training = max(1, cores - 1)
    return HardwareProfile(
        name="some CPU",
        device=Device(
            name="some CPU",
            is_cpu=True,
            memory=_quantity(memory_bytes),
            flops={
                dtype: _quantity(8e10 * training) for dtype in ("float32", "bfloat16", "float16")
            },
            matmul_efficiency=_quantity(1.0),
            matmul_latency=_quantity(1e-9),
            attention_efficiency=_quantity(0.4),
            bandwidth=_quantity(2e10 * training),
            bandwidth_efficiency=_quantity(1.0),
            launch=_quantity(2e-5),
            gradient_bandwidth=_quantity(5e9),
        ),
        link=Link(
            name="memory",
            d2h=_quantity(1e12),
            h2d=_quantity(1e12),
            duplex=_quantity(1.0),
            pageable=_quantity(1.0),
            latency=_quantity(1e-9),
        ),
        host=Host(
            name="some CPU",
            sockets=1,
            cores=cores,
            dram=_quantity(2.5e10 * max(1.0, cores / 2)),
            dram_bytes=_quantity(memory_bytes),
            core_bandwidth=_quantity(1.5e10),
            numa_hop=_quantity(1.0),
            core_sharing=_quantity(1.2),
            core_update=_quantity(CORE_UPDATE.value),
        ),
        overheads=EngineOverheads(
            host_task=_quantity(5e-5),
            copy=_quantity(2e-4),
            bucket=_quantity(2e-4),
            step=_quantity(1e-3),
            select=_quantity(3e-4),
            intake_bandwidth=_quantity(5e9),
            pack_bandwidth=_quantity(5e9),
            unpack_bandwidth=_quantity(2.5e9),
            device_update=_quantity(4e8),
        ),
        host_threads=training,
    )


def generic_gpu() -> HardwareProfile:
    """Return a data center's GPU of a recent generation on PCIe 5."""
    return find_machine("hgx-h100", 1)


_OF_CAPABILITY = {
    (7, 0): "v100-sxm2",
    (7, 5): "t4",
    (8, 0): "a100-80-sxm",
    (8, 6): "rtx3090",
    (8, 9): "rtx4090",
    (9, 0): "h100-sxm",
    (10, 0): "b200-sxm",
    (12, 0): "rtx5090",
}
"""Device of the table that stands for others of its CUDA compute capability."""


def gpu_like(name: str, capability: tuple[int, int]) -> Device:
    """Return a GPU of the table, or one that stands for a GPU which the table lacks.

    Args:
        name: As torch reports it.
        capability: CUDA compute capability, major and minor.

    Returns:
        The table's device of this name. Else a device of the capability, or the newest one below,
        whose rates are known to a factor of e.

    Examples:
        >>> gpu_like("NVIDIA A100-SXM4-80GB", (8, 0)).bandwidth.uncertainty
        0.05
        >>> other = gpu_like("NVIDIA RTX A4000", (8, 6))
        >>> other.name, other.bandwidth_efficiency.uncertainty
        ('rtx3090', 1.0)
    """
    try:
        return find_device(name)
    except ConfigError:
        older = [known for known in _OF_CAPABILITY if known <= capability]
        found = find_device(_OF_CAPABILITY[max(older, default=min(_OF_CAPABILITY))])
    unknown: dict[str, Any] = {
        own.name: replace(value, sigma=SIGMA)
        for own in fields(found)
        if isinstance(value := getattr(found, own.name), Quantity)
    }
    peaks = {dtype: replace(peak, sigma=SIGMA) for dtype, peak in found.flops.items()}
    return replace(found, flops=peaks, **unknown)


def _quantity(value: float) -> Quantity:
    return Quantity(
        value=value, kind="estimated", source="of no machine in particular", sigma=SIGMA
    )
