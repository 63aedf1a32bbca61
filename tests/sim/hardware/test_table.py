"""The hardware table: figures in their ranges, peaks dense, rates below what carries them."""

import re

import pytest

from sim.hardware import catalog
from sim.hardware.catalog import assemble, find_device, find_host, find_machine
from sim.hardware.quantities import quantity_of, read_table

SHARE = (0.05, 1.0)
RANGES = {
    "device.memory": (10e9, 300e9),
    "device.flops.bfloat16": (50e12, 3e15),
    "device.flops.float16": (50e12, 3e15),
    "device.flops.float32": (8e12, 200e12),
    "device.matmul_efficiency": (0.5, 1.25),
    "device.sustained_share": (0.5, 1),
    "device.matmul_latency": (0.1e-6, 50e-6),
    "device.attention_efficiency": (0.2, 0.75),
    "device.attention_backward_efficiency": (0.2, 0.75),
    "device.bandwidth": (300e9, 10e12),
    "device.bandwidth_efficiency": (0.6, 0.97),
    "device.launch": (1e-6, 50e-6),
    "device.backward_launch": (1e-6, 50e-6),
    "device.compiled_launch": (1e-6, 20e-6),
    "host.deepspeed_share": (0.1, 1.0),
    "device.backward_factor": (0.5, 2),
    "link.d2h": (5e9, 450e9),
    "link.h2d": (5e9, 450e9),
    "link.duplex": (0.4, 1),
    "link.pageable": SHARE,
    "link.latency": (1e-6, 20e-6),
    "fabric.bandwidth": (5e9, 900e9),
    "fabric.latency": (5e-6, 200e-6),
    "host.dram": (20e9, 1e12),
    "host.dram_bytes": (16e9, 8e12),
    "host.core_bandwidth": (3e9, 50e9),
    "host.numa_hop": (0.2, 1),
    "host.core_sharing": (1, 2),
    "host.core_update": (0.5e9, 5e9),
    "nvme.read": (1e9, 100e9),
    "nvme.write": (0.5e9, 100e9),
    "nvme.capacity": (0.2e12, 200e12),
    "overheads.host_task": (1e-6, 1e-3),
    "overheads.copy": (1e-6, 1e-3),
    "overheads.bucket": (1e-6, 1e-3),
    "overheads.step": (10e-6, 10e-3),
    "overheads.select": (10e-6, 10e-3),
    "overheads.intake_bandwidth": (100e9, 10e12),
    "overheads.pack_bandwidth": (50e9, 10e12),
    "overheads.device_update": (3e9, 500e9),
}
PIN_GBITS = {
    "HBM2": (1.6, 2.5),
    "HBM2e": (2.9, 3.6),
    "HBM3": (5.1, 6.4),
    "HBM3e": (6.2, 9.8),
    "GDDR6": (10, 20),
    "GDDR6X": (19, 24),
    "GDDR7": (28, 32),
}
"""What a pin of each kind of memory carries, from its slowest to its fastest use."""


def entries(table):
    return {name: entry for name, entry in read_table(table).items() if name != "default"}


def limit(table, name):
    return quantity_of(entries(table)[name]["limit"], "limit", name).value


def everything():
    """Yield machines in which each part of the table occurs."""
    for device in catalog.names("device"):
        yield assemble(device, "epyc-7742", "pcie4")
    for host in catalog.names("host"):
        yield assemble("a100", host, "pcie4")
    for link in catalog.names("link"):
        yield assemble("a100", "epyc-7742", link)
    for fabric in catalog.names("fabric"):
        yield assemble("a100", "epyc-7742", "pcie4", fabric=fabric)
    for nvme in catalog.names("nvme"):
        yield assemble("a100", "epyc-7742", "pcie4", nvme=nvme)
    for name in catalog.names("machine"):
        yield find_machine(name)


def test_every_figure_is_in_its_range():
    for machine in everything():
        for key, figure in machine.quantities().items():
            low, high = RANGES[key]
            assert low <= figure.value <= high, (machine.name, key, figure)


@pytest.mark.parametrize("name", catalog.names("device"))
def test_devices_do_between_a_few_dozen_and_a_few_hundred_flop_per_byte(name):
    device = find_device(name)
    assert 70 < device.flops["float16"].value / device.bandwidth.value < 500
    # Tensor cores double float32's rate at least, and no dense rate is 32 times that.
    assert 1.9 < device.flops["float16"].value / device.flops["float32"].value < 32
    if "bfloat16" in device.flops:
        assert device.flops["bfloat16"].value == device.flops["float16"].value


@pytest.mark.parametrize("name", catalog.names("device"))
def test_peaks_are_dense(name):
    silicon = entries("devices")[name]["silicon"]
    dense = silicon["sms"] * silicon["mhz"] * 1e6 * silicon["flop_per_clock"]
    assert find_device(name).flops["float16"].value == pytest.approx(dense, rel=0.02)


@pytest.mark.parametrize("name", catalog.names("device"))
def test_bandwidth_is_what_the_memory_carries(name):
    silicon = entries("devices")[name]["silicon"]
    low, high = PIN_GBITS[silicon["memory"]]
    per_pin = find_device(name).bandwidth.value * 8 / silicon["bus_bits"] / 1e9
    assert low <= per_pin <= high


@pytest.mark.parametrize("name", catalog.names("link"))
def test_links_stay_below_their_specification(name):
    link, most = catalog.find_link(name), limit("links", name)
    for figure in (link.d2h, link.h2d):
        assert 0.6 * most < figure.value < 0.95 * most


@pytest.mark.parametrize("name", catalog.names("fabric"))
def test_fabrics_stay_below_their_specification(name):
    reached = catalog.find_fabric(name).bandwidth.value
    assert 0.3 * limit("fabrics", name) < reached < 0.95 * limit("fabrics", name)


@pytest.mark.parametrize("name", read_table("networks"))
def test_networks_stay_below_their_specification(name):
    reached = catalog.find_network(name).bandwidth.value
    assert 0.7 * limit("networks", name) < reached < 0.97 * limit("networks", name)


@pytest.mark.parametrize("name", catalog.names("host"))
def test_memory_stays_below_what_its_channels_carry(name):
    host = find_host(name)
    bus = entries("hosts")[re.sub(r"^\dx-", "", name)]["memory_bus"]
    peak = bus["channels"] * bus["bits"] / 8 * bus["mts"] * 1e6
    assert 0.55 * peak < host.dram.value < 0.95 * peak
    assert (
        host.core_bandwidth.value < host.dram.value < 1.05 * host.cores * host.core_bandwidth.value
    )


def test_a_socket_of_epyc_7742_does_what_elixirs_cpu_adam_did():
    host = find_host("epyc-7742")
    reached = min(host.dram.value, host.cores * host.core_bandwidth.value) / 28
    assert 5.15e9 < reached < 1.5 * 5.15e9
