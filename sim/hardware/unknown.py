"""Machines of which nothing is known but their kind: somewhere to start from.

Figures are rough ones of this decade's hardware, all estimated: good for telling which lane a
setting loads, not for its seconds. What uses them must correct them by measurement.
"""

from __future__ import annotations

from sim.hardware.catalog import find_machine
from sim.hardware.components import CORE_UPDATE, Device, EngineOverheads, Host, Link
from sim.hardware.figures import Quantity
from sim.hardware.profile import HardwareProfile

SIGMA = 1.0
"""Log-normal spread of a generic figure: a factor of e is no surprise."""


def generic_cpu(cores: int, memory_bytes: float) -> HardwareProfile:
    """Return a CPU that plays the device beside the host's worker, on its own cores.

    Args:
        cores: Hardware threads that the process may use.
        memory_bytes: Of the machine.

    Raises:
        ConfigError: A number is not positive.
    """
    training = max(1, cores - 1)
    return HardwareProfile(
        name="some CPU",
        device=Device(
            name="some CPU",
            is_cpu=True,
            memory=_figure(memory_bytes),
            flops={
                dtype: _figure(8e10 * training) for dtype in ("float32", "bfloat16", "float16")
            },
            matmul_efficiency=_figure(1.0),
            matmul_latency=_figure(1e-9),
            attention_efficiency=_figure(0.4),
            bandwidth=_figure(2e10 * training),
            bandwidth_efficiency=_figure(1.0),
            launch=_figure(2e-5),
            gradient_bandwidth=_figure(5e9),
        ),
        link=Link(
            name="memory",
            d2h=_figure(1e12),
            h2d=_figure(1e12),
            duplex=_figure(1.0),
            pageable=_figure(1.0),
            latency=_figure(1e-9),
        ),
        host=Host(
            name="some CPU",
            sockets=1,
            cores=cores,
            dram=_figure(2.5e10 * max(1.0, cores / 2)),
            dram_bytes=_figure(memory_bytes),
            core_bandwidth=_figure(1.5e10),
            numa_hop=_figure(1.0),
            core_sharing=_figure(1.2),
            core_update=_figure(CORE_UPDATE.value),
        ),
        overheads=EngineOverheads(
            host_task=_figure(5e-5),
            copy=_figure(2e-4),
            bucket=_figure(2e-4),
            step=_figure(1e-3),
            select=_figure(3e-4),
            intake_bandwidth=_figure(5e9),
            pack_bandwidth=_figure(5e9),
            unpack_bandwidth=_figure(2.5e9),
            device_update=_figure(4e8),
        ),
        host_threads=training,
    )


def generic_gpu() -> HardwareProfile:
    """Return a data center's GPU of a recent generation on PCIe 5."""
    return find_machine("hgx-h100", 1)


def _figure(value: float) -> Quantity:
    return Quantity(
        value=value, kind="estimated", source="of no machine in particular", sigma=SIGMA
    )
