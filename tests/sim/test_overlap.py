"""Collectives beside compute, copies that a host waits for, the order of systems and machines."""

from dataclasses import replace

import pytest

from sim.hardware.catalog import find_machine
from sim.machine import Machine
from sim.models.table import find_model
from sim.models.workload import Workload
from sim.simulate import Strategy, simulate
from sim.timing.costs import costs_of


def costs(machine="dgx-a100-80", devices=8, hosts=1, model="llama-3.2-1b", tokens=512, **options):
    workload = Workload.of_config(*find_model(model), batch_size=1, sequence=tokens, **options)
    return costs_of(workload, find_machine(machine, devices, num_hosts=hosts))


def step(found, name, **options):
    return simulate(found, Strategy.of(name, **options), keeps_spans=False).step_seconds


def side_by_side(hardware, compute, collective):
    """Return the ends of compute and of a collective of so many seconds that begin at once."""
    machine = Machine(hardware)
    alone = machine.ring_work(1e9)
    machine.env.run(machine.fabric.submit("reduce", 1, alone))
    rate = 1e9 / machine.env.now
    machine = Machine(hardware)
    ends = (
        machine.compute("backward", compute, 1),
        machine.fabric.submit("reduce", 1, machine.ring_work(collective * rate)),
    )
    found = []
    for end in ends:
        end.callbacks.append(lambda _: found.append(machine.env.now))
    machine.env.run()
    return found


@pytest.mark.parametrize(("devices", "hosts"), [(8, 1), (8, 4), (1, 4)])
def test_a_collective_takes_its_part_of_a_device_while_it_runs(devices, hosts):
    hardware = find_machine("dgx-a100-80", devices, num_hosts=hosts)
    latencies = [name for name in hardware.quantities() if name.endswith(".latency")]
    hardware = hardware.with_values(dict.fromkeys(latencies, 1e-12))
    share = hardware.device.collective_share.value
    # A second of compute: half of it beside a collective, which keeps its own pace.
    first, last = side_by_side(hardware, 1.0, 0.5)
    assert first == pytest.approx(0.5, rel=1e-3)
    assert last == pytest.approx(1.0 + share * 0.5, rel=1e-3)
    # All of it beside one that is longer.
    first, last = side_by_side(hardware, 1.0, 9.0)
    assert (first, last) == (
        pytest.approx(1.0 / (1 - share), rel=1e-3),
        pytest.approx(9, rel=1e-3),
    )


def test_one_device_has_nothing_beside_its_compute():
    machine = Machine(find_machine("dgx-a100-80", 1))
    machine.env.run(machine.compute("backward", 1.0, 1))
    assert machine.env.now == 1.0


def test_a_step_is_between_its_longer_part_and_the_sum_of_both():
    found = costs(hosts=2, model="llama-2-7b", tokens=4096)
    whole = simulate(found, Strategy.of("fsdp2"), keeps_spans=False)
    free = replace(found.hardware, device=replace(found.hardware.device, collective_share=None))
    ideal = step(replace(found, hardware=free), "fsdp2")
    compute, fabric = (whole.busy_seconds[lane] for lane in ("device", "fabric"))
    assert ideal < whole.step_seconds < compute + fabric


# ---- copies that a host waits for ---------------------------------------------------------------


@pytest.mark.parametrize("offload", ["optimizer", "all"])
def test_what_a_host_waits_for_is_never_faster(offload):
    found = costs(devices=4, model="llama-3.2-1b")

    def taken(**options):
        return step(found, "zero3_offload", offload=offload, bucket_elements=10**8, **options)

    best, waiting = taken(waits_for_copies=False), taken()
    assert best < waiting < taken(pin_memory=False)
    assert waiting <= taken(overlap_comm=False) * (1 + 1e-9)


def test_pageable_copies_take_the_links_share():
    hardware = find_machine("dgx-a100-80", 1)
    share = hardware.link.pageable.value
    for way in ("down", "up"):
        ends = []
        for slow in (False, True):
            machine = Machine(hardware)
            work = getattr(machine, way)(1e10)
            lane = machine.d2h if way == "down" else machine.h2d
            machine.env.run(lane.submit("copy", 1, machine.pageable(work) if slow else work))
            ends.append(machine.env.now)
        assert ends[1] == pytest.approx(ends[0] / share, rel=1e-3), way


def test_small_buckets_let_reductions_begin_before_backward_has_ended():
    found = costs(hosts=4, model="llama-3.2-1b", tokens=4096)
    layered, whole = (
        step(found, "deepspeed_zero3", bucket_elements=size) for size in (1, 10_000_000_000)
    )
    assert layered < whole


# ---- order of systems and of machines -----------------------------------------------------------

PAIRS = [
    ("superoffload", "deepspeed_zero3"),
    ("zero3_offload", "deepspeed_zero3"),
    ("deepspeed_zero_offload", "deepspeed_zero2"),
    ("fsdp2_offload", "fsdp2"),
]
SHARDED = ["fsdp2", "fsdp2_offload", "deepspeed_zero3", "zero3_offload"]


@pytest.mark.parametrize(("offloaded", "whole"), PAIRS)
@pytest.mark.parametrize(
    ("machine", "devices", "hosts"),
    [("dgx-a100-80", 8, 1), ("hgx-h100", 8, 2), ("v100-server", 4, 1), ("gh200-quad", 1, 1)],
)
def test_no_system_is_faster_with_offload_on_the_same_devices(
    offloaded, whole, machine, devices, hosts
):
    dtype = "float16" if "v100" in machine else "bfloat16"
    found = costs(machine, devices, hosts, tokens=256, dtype=dtype)
    assert step(found, offloaded) > step(found, whole)


@pytest.mark.parametrize("name", [*SHARDED, "ddp"])
@pytest.mark.parametrize("tokens", [128, 4096])
def test_more_hosts_are_never_faster_for_each_device(name, tokens):
    # The optimizer's own work is divided, so compute and collectives alone are compared.
    taken = []
    for hosts in (1, 2, 8, 64):
        found = costs(hosts=hosts, tokens=tokens)
        free = found.hardware.with_values(
            {"overheads.device_update": 1e18, "host.dram": 1e18, "host.core_bandwidth": 1e18,
             "host.core_update": 1e18, "host.deepspeed_share": 1e6, "host.page_bandwidth": 1e18,
             "link.d2h": 1e18, "link.h2d": 1e18}
        )  # fmt: skip
        taken.append(step(replace(found, hardware=free), name))
    assert taken == sorted(taken)
    assert taken[-1] > taken[1]


@pytest.mark.parametrize("name", SHARDED)
def test_a_longer_latency_is_never_faster(name):
    taken = []
    for latency in (1e-6, 1e-5, 1e-4, 1e-3):
        found = costs(hosts=4, tokens=256)
        slow = found.hardware.with_values({"network.latency": latency})
        taken.append(step(replace(found, hardware=slow), name))
    assert taken == sorted(taken)
    assert taken[-1] > taken[0]


def test_hooks_of_shards_take_the_host_on_one_device_too():
    # Short steps are bound by launches and hooks: no collective is faster than none.
    def passes(devices, name):
        found = simulate(costs(devices=devices, tokens=64), Strategy.of(name), keeps_spans=False)
        return sum(found.passes.values())

    assert passes(1, "ddp") < 0.7 * passes(1, "fsdp2")
    assert passes(1, "fsdp2") == pytest.approx(passes(2, "fsdp2"), rel=0.1)


def test_stage_3_gathers_a_large_layer_in_pieces_with_a_latency_each():
    # 202 million elements of a layer in five pieces, the tables' 131 million in three.
    found = costs(hosts=4, model="llama-2-7b", tokens=64)
    slow = found.hardware.with_values({"network.latency": 0.1})
    before = step(found, "deepspeed_zero3")
    after = step(replace(found, hardware=slow), "deepspeed_zero3")
    # Forward and backward gather all, but for the last layer once; gradients are in 14 buckets.
    pieces = 2 * (32 * 5 + 3) + 3
    buckets = 12
    hop = 3 * (0.1 - found.hardware.network.latency.value)
    assert after - before == pytest.approx(hop * (pieces + buckets), rel=0.02)
