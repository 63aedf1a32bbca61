"""The hardware table: figures in their ranges, peaks dense, rates below what carries them."""

import math
import re
from dataclasses import replace
from statistics import mean, stdev

import pytest

from sim.hardware import catalog
from sim.hardware.catalog import assemble, find_device, find_host, find_machine
from sim.hardware.cells import quantity_of, read_table
from sim.hardware.components import ADAM_SHARE
from sim.machine import Machine, Rates, least_seconds

SHARE = (0.05, 1.0)
RANGES = {
    "device.memory": (10e9, 300e9),
    "device.flops.bfloat16": (20e12, 3e15),
    "device.flops.float16": (20e12, 3e15),
    "device.flops.float32": (8e12, 200e12),
    "device.matmul_efficiency": (0.5, 1.25),
    "device.float32_efficiency": (0.4, 1),
    "device.cache": (30e6, 150e6),
    "device.sustained_share": (0.5, 1),
    "device.matmul_latency": (0.1e-6, 50e-6),
    "device.attention_efficiency": (0.1, 0.75),
    "device.attention_backward_efficiency": (0.1, 0.75),
    "device.native_attention_efficiency": (0.2, 0.75),
    "device.native_attention_backward_efficiency": (0.2, 0.75),
    "device.attention_tokens": (100, 3000),
    "device.bandwidth": (280e9, 10e12),
    "device.bandwidth_efficiency": (0.6, 0.97),
    "device.launch": (1e-6, 50e-6),
    "device.collective_share": (0.05, 0.4),
    "device.backward_launch": (1e-6, 50e-6),
    "device.compiled_launch": (1e-6, 20e-6),
    "host.adam_share": (0.5, 1.0),
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
    "host.page_bandwidth": (1e9, 50e9),
    "host.compact_coding": (0.5, 5),
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


@pytest.mark.parametrize("name", catalog.names("host"))
def test_no_host_has_more_memory_than_it_takes(name):
    host = find_host(name)
    assert host.dram_bytes.value <= catalog.most_memory(host) <= 8 << 43
    assert catalog.most_memory(replace(host, name="measured here")) is None


def test_a_socket_of_epyc_7742_does_what_elixirs_cpu_adam_did():
    host = find_host("epyc-7742")
    reached = min(host.dram.value, host.cores * host.core_bandwidth.value) / 28
    assert 5.15e9 < reached < 1.5 * 5.15e9


def test_what_adam_kernels_reach_is_the_mean_of_four_measured_ones_and_their_spread():
    # G parameters, their seconds, bytes each, GB/s of STREAM: the largest size of each table.
    hop = (1 + find_host("xeon-8168").numa_hop.value) / 2
    kernels = [
        (10, 2.57, 30, 2 * 101 * hop),  # CPU-Adam on two Xeon 8168
        (8, 0.608, 28, 486),  # GraceAdam
        (8, 0.769, 28, 486),  # CPU-Adam on Grace
        (32 * 2**22 / 1e9, 31.7812e-3, 28, 160),  # torch on Ice Lake
    ]
    shares = [math.log(count * size / seconds / dram) for count, seconds, size, dram in kernels]
    assert ADAM_SHARE.value == pytest.approx(math.exp(mean(shares)), abs=0.005)
    another = stdev(shares) * math.sqrt(1 + 1 / len(shares))  # of a kernel that is not among them
    assert ADAM_SHARE.uncertainty == pytest.approx(another, abs=0.005)


# STREAM's triad and a read-only loop on one socket, GB/s by number of threads.
XEON_8160 = [13.8, 27.6, 40.4, 53.4, 64.2, 75.3, 83.9, 88.4, 91.0, 92.4, 95.2, 97.7, 99.0, 98.2,
             100.8, 102.3, 100.6, 100.8, 100.0, 101.3, 100.5, 98.4, 99.2, 98.5]  # fmt: skip
ZEN_2 = {1: 19.9, 2: 33.5, 4: 63.1, 8: 101.6, 16: 109.7, 32: 116.0}
CURVES = [dict(enumerate(XEON_8160, 1)), ZEN_2]


def host_rate(machine):
    made = Machine(machine)
    return 1e9 / least_seconds(made.host_kind, 1e9)


@pytest.mark.parametrize("curve", CURVES, ids=["xeon-8160", "zen-2"])
def test_threads_that_add_up_until_memory_is_full_are_within_their_spread_of_measured_ones(curve):
    base = find_machine("a100-epyc-7742", 1)
    base = base.with_values(
        {
            "host.core_bandwidth": curve[1] * 1e9,
            "host.dram": max(curve.values()) * 1e9,
            "host.adam_share": 1.0,
        }
    )
    spread = base.host.core_bandwidth.uncertainty
    off = [
        host_rate(replace(base, host_threads=threads)) / (measured * 1e9)
        for threads, measured in curve.items()
    ]
    assert max(off) < 1 + 1.1 * spread
    assert min(off) > 0.95
    assert all(each < 1.06 for each in off[-2:])  # with twice the threads of the bend and more


@pytest.mark.parametrize("name", catalog.names("machine"))
def test_the_kernel_has_no_more_than_its_share_of_memory_or_what_its_threads_move(name):
    for machine in (find_machine(name), replace(find_machine(name), host_threads=1)):
        rates, host = Rates.of(machine), machine.host
        threads = machine.threads_per_device * host.core_bandwidth.value * rates.reach
        memory = host.adam_share.value * rates.dram / rates.sharing
        assert host_rate(machine) == pytest.approx(min(threads, memory))
