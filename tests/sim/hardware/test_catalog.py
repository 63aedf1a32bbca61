"""Parts and machines by name: found as people write them, offered when unknown, put together."""

import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.hardware import catalog
from sim.hardware.catalog import assemble, find_device, find_host, find_machine
from sim.hardware.cells import read_table
from sim.hardware.profile import HardwareProfile
from sim.hardware.quantity import Quantity
from sim.machine import Rates
from sim.names import fold
from zenflow.errors import ConfigError

FINDERS = {
    "device": find_device,
    "host": find_host,
    "link": catalog.find_link,
    "fabric": catalog.find_fabric,
    "network": catalog.find_network,
    "nvme": catalog.find_nvme,
    "machine": find_machine,
}


@pytest.mark.parametrize("kind", FINDERS)
def test_every_name_is_found_and_made(kind):
    assert catalog.names(kind)
    for name in catalog.names(kind):
        assert FINDERS[kind](name).name == name


@pytest.mark.parametrize(
    ("spoken", "name"),
    [
        ("a100", "a100-80-sxm"),
        ("NVIDIA A100-SXM4-40GB", "a100-40-sxm"),
        ("RTX 4090", "rtx4090"),
        ("4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA H200", "h200-sxm"),
        ("NVIDIA L4", "l4"),
        ("RTX 5080", "rtx5080"),
        ("NVIDIA A10G", "a10g"),
        ("h100_sxm", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
    ],
)
def test_devices_have_the_names_that_people_and_torch_give_them(spoken, name):
    assert find_device(spoken).name == name


@given(data=st.data())
def test_case_and_separators_do_not_matter(data):
    kind = data.draw(st.sampled_from(sorted(FINDERS)))
    name = data.draw(st.sampled_from(catalog.names(kind)))
    spoken = "".join(
        data.draw(st.sampled_from([c.upper(), c.lower()]))
        + data.draw(st.sampled_from(["", " ", "_"]))
        for c in name.replace("-", data.draw(st.sampled_from(["", " ", "_", "-"])))
    )
    assert FINDERS[kind](spoken).name == name


@pytest.mark.parametrize("kind", FINDERS)
def test_no_name_stands_for_two_things(kind):
    own = catalog._entries(kind)
    spellings = [
        (fold(alias), name)
        for name, entry in own.items()
        for alias in {fold(a) for a in (name, *entry.get("aliases", ()))}
    ]
    assert len({spelling for spelling, _ in spellings}) == len(spellings)


@pytest.mark.parametrize("kind", FINDERS)
def test_an_unknown_name_is_refused(kind):
    find = FINDERS[kind]
    with pytest.raises(ConfigError, match=f"there is no {kind} 'qqq': known are "):
        find("qqq")


def test_a_nearly_right_name_gets_the_nearest_ones():
    with pytest.raises(ConfigError, match="nearest names are rtx4090, "):
        find_device("rtx 4091")
    with pytest.raises(ConfigError, match="nearest names are dgx-a100-40, "):
        find_machine("dgx-a100-41")


def test_two_sockets_have_twice_the_memory():
    one, two = find_host("epyc-7742"), find_host("2x EPYC 7742")
    assert (one.sockets, two.sockets) == (1, 2)
    assert two.dram_bytes.value == 2 * one.dram_bytes.value
    assert replace(two, name=one.name, sockets=1, dram_bytes=one.dram_bytes) == one
    with pytest.raises(ConfigError, match="no host '2x-desktop-ddr5'"):
        find_host("2x-desktop-ddr5")


def test_eight_adapters_carry_eight_times_as_much():
    one, eight = catalog.find_network("ib-hdr"), catalog.find_network("8x ib-hdr")
    assert (one.adapters, eight.adapters) == (1, 8)
    assert replace(eight, name=one.name, adapters=1) == one
    with pytest.raises(ConfigError, match="no network '9x-infiniband-hdr'"):
        catalog.find_network("9x-infiniband-hdr")


def test_several_machines_are_joined_by_their_own_network_or_another():
    one, two = find_machine("dgx-a100-80"), find_machine("dgx-a100-80", num_hosts=2)
    assert (one.network, two.network.name) == (None, "8x-infiniband-hdr")
    assert (one.total_devices, two.total_devices) == (8, 16)
    assert replace(two, num_hosts=1, network=None) == one
    other = find_machine("l40s-server", 4, num_hosts=3, network="roce-400")
    assert (other.total_devices, other.network.name) == (12, "roce-400")


@pytest.mark.parametrize("name", catalog.names("machine"))
def test_machines_assemble_with_one_device_and_with_all(name):
    whole, one = find_machine(name), find_machine(name, 1)
    assert isinstance(whole, HardwareProfile)
    assert whole.num_devices == read_table("machines")[name]["num_devices"]
    assert replace(one, num_devices=whole.num_devices) == whole
    assert set(whole.metadata) == {"title", "source"}


def test_a_machine_has_no_more_devices_than_it_holds():
    with pytest.raises(ConfigError, match=r"dgx-a100-40 holds 8 devices, .* 1\.\.8, got 9"):
        find_machine("dgx-a100-40", 9)
    with pytest.raises(ConfigError, match="got 0"):
        find_machine("dgx-a100-40", 0)


def test_the_dgx_a100_is_what_its_data_sheet_says():
    machine = find_machine("DGX A100 640")
    assert machine.device.name == "a100-80-sxm"
    assert (machine.num_devices, machine.total_cores, machine.devices_per_socket) == (8, 128, 4)
    assert machine.host.dram_bytes.value == 2048 * 2**30


@pytest.mark.parametrize(
    ("count", "binds_cores", "threads", "gigabytes"),
    [
        (1, True, 64 - 1, 189),  # its own socket's, not both sockets'
        (2, True, 64 - 1, 189),
        (8, True, 128 / 8 - 1, 189 / 4),
        (1, False, 128 - 1, 2 * 189 * 0.85),  # both sockets', half of it a hop away
        (2, False, 128 / 2 - 1, 189 * 0.85),
        (8, False, 128 / 8 - 1, 2 * 189 * 0.85 / 8),
    ],
)
def test_a_bound_device_has_its_sockets_cores_and_memory(count, binds_cores, threads, gigabytes):
    machine = replace(find_machine("dgx-a100-40", count), binds_cores=binds_cores)
    assert machine.threads_per_device == threads
    rates = Rates.of(machine)
    assert rates.dram / rates.sharing == pytest.approx(gigabytes * 1e9)


def test_parts_by_name_and_parts_made_by_hand_go_together():
    link = replace(catalog.find_link("pcie5"), name="mine")
    made = assemble("h100", find_host("epyc-9654"), link, 2, fabric="nvlink4", host_memory=5e11)
    assert made.link is link
    assert made.host.dram_bytes.value == 5e11
    assert made.fabric.name == "nvlink4"
    assert made.nvme is None
    assert made.name == "2x h100-sxm, epyc-9654, mine"


def launches(machine):
    device = machine.device
    cells = device.launch, device.backward_launch, device.compiled_launch
    return [cell.value for cell in cells]


def test_launches_are_the_hosts_and_not_the_cards():
    old = assemble("h100", "epyc-7742", "pcie4")
    new = assemble("h100", "2x-xeon-8480c", "pcie4")
    assert launches(new) == pytest.approx([0.64 * seconds for seconds in launches(old)])
    assert launches(assemble("a100", "xeon-8480c", "pcie4")) == launches(new)
    assert launches(assemble("h100", find_host("xeon-8480c"), "pcie4")) == launches(new)
    assert launches(find_machine("hgx-h100", 1)) == launches(new)


def test_launches_of_a_device_made_by_hand_or_beside_such_a_host_stay_as_they_are():
    own = find_device("h100")
    measured = replace(find_host("xeon-8480c"), name="measured here")
    for machine in (
        assemble(own, "xeon-8480c", "pcie4"),
        assemble("h100", measured, "pcie4"),
        assemble("h100", "grace", "pcie4"),  # two measurements of it don't agree
    ):
        assert machine.device == own


def test_several_devices_need_a_fabric():
    with pytest.raises(ConfigError, match="several devices need a fabric"):
        assemble("h100", "epyc-9654", "pcie5", 2)


def test_overheads_of_a_gpu_follow_its_bandwidth():
    device = find_device("h200")
    made = assemble(device, "xeon-8480c", "pcie5").overheads
    reached = 4800e9 * 0.85
    assert made.intake_bandwidth.value == pytest.approx(reached)
    assert made.pack_bandwidth.value == pytest.approx(reached / 2)
    assert made.device_update.value == pytest.approx(reached / 30)
    given = replace(made, copy=Quantity(value=1.0))
    assert assemble(device, "xeon-8480c", "pcie5", overheads=given).overheads is given


def test_a_cpu_in_the_devices_role_brings_its_own_overheads():
    cpu = replace(find_device("h200"), name="cpu", is_cpu=True)
    with pytest.raises(ConfigError, match=r"cpu is a CPU, .* `zenflow calibrate`"):
        assemble(cpu, "epyc-9654", "pcie5")


def test_a_product_of_a_tenth_of_2048_cubed_runs_at_half_of_an_a100():
    device = find_device("a100")
    half = device.matmul_latency.value * device.flops["bfloat16"].value
    assert half == pytest.approx(0.1 * 2 * 2048**3, rel=0.05)


def test_a_found_device_is_the_callers_own():
    find_device("a100").flops["float16"] = Quantity(value=1.0)
    assert find_device("a100").flops["float16"].value == 312e12


def test_importing_loads_nothing_heavy():
    code = (
        "import sys, sim.hardware.catalog, sim.models.table, sim.hardware.file\n"
        "sim.hardware.catalog.find_machine('gh200'); sim.models.table.find_model('gpt2')\n"
        "print([m for m in ('torch', 'numpy', 'pandas', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
