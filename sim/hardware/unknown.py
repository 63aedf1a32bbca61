"""Machines of which nothing is known but their kind: somewhere to start from.

All quantities are estimates for hardware of this decade. Such a profile tells which lane a setting
loads, and not its seconds. Whoever uses one must correct it by measurement.
"""

from __future__ import annotations

from sim.hardware.catalog import find_machine
from sim.hardware.components import CORE_UPDATE, Device, EngineOverheads, Host, Link
from sim.hardware.profile import HardwareProfile
from sim.hardware.quantity import Quantity

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


def _quantity(value: float) -> Quantity:
    return Quantity(
        value=value, kind="estimated", source="of no machine in particular", sigma=SIGMA
    )
