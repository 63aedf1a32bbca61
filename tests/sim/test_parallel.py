"""Several devices and hosts: collectives, sharded weights, the update that devices divide."""

from dataclasses import replace

import pytest

from sim.hardware.catalog import find_machine
from sim.hardware.components import Fabric, Network
from sim.hardware.quantity import Quantity
from sim.machine import Machine
from sim.memory.need import memory_of
from sim.memory_parts import STATE_BYTES
from sim.models.table import find_model
from sim.models.workload import Workload
from sim.schedules.parallel import ddp
from sim.simulate import Strategy, simulate
from sim.timing.costs import costs_of, layers_of
from sim.timing.host_memory import PROCESS_BYTES
from sim.timing.phases import costs_of_phases
from zenflow.config import PRESETS
from zenflow.errors import ConfigError

LAYERS = 10
PARAMS = 10_000_000
MODEL = 2 * PARAMS
"""Bytes in 16 bits."""
COLUMNS = LAYERS * 1000
ENDLESS = 1e-9


def costs(
    devices=2, hosts=1, *, gather=ENDLESS, network=ENDLESS, forward=10.0, backward=20.0,
    link=ENDLESS, update=ENDLESS, on_device=ENDLESS, latency=1e-12, accumulation=1, adapters=1,
):  # fmt: skip
    """Return costs by the seconds in which each lane would pass the whole model."""
    found = costs_of_phases(
        forward=forward, backward=backward, d2h=link, update=update, h2d=link,
        num_params=PARAMS, num_layers=LAYERS,
    )  # fmt: skip
    hardware = replace(
        found.hardware.with_values({"overheads.device_update": PARAMS / on_device}),
        num_devices=devices,
        fabric=Fabric(name="NVLink", bandwidth=figure(MODEL / gather), latency=figure(latency)),
        num_hosts=hosts,
        network=Network(
            name="network",
            adapters=adapters,
            bandwidth=figure(MODEL / network / adapters),
            latency=figure(latency),
        ),
    )
    return replace(found, hardware=hardware, accumulation=accumulation)


def figure(value):
    return Quantity(value=value)


def near(seconds):
    return pytest.approx(seconds, rel=1e-6)


def predict(found, name, **options):
    return simulate(found, Strategy.of(name, **options))


def step(found, name, **options):
    return predict(found, name, **options).step_seconds


def stalls(found, name, **options):
    timeline = predict(found, name, **options).timeline
    steps = len({span.step for span in timeline.spans if span.lane == "device"})
    return {cause: seconds / steps for cause, seconds in timeline.stalls().items()}


def collective(hardware, num_bytes):
    machine = Machine(hardware)
    started = machine.env.event()
    started.succeed()
    machine.collective("all-gather", num_bytes, 1, started)
    machine.env.run()
    return machine.env.now


# ---- one collective -----------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_a_ring_passes_all_but_one_part_through_each_device(devices):
    hardware = costs(devices, gather=6.0).hardware
    assert collective(hardware, MODEL) == near(6.0 * (devices - 1) / devices)
    assert collective(replace(hardware, num_devices=1), MODEL) == 0


def test_the_slowest_link_sets_a_rings_pace_over_hosts():
    # A ring enters and leaves a host once, over all its adapters together.
    assert collective(costs(4, 3, gather=2.0, network=6.0).hardware, MODEL) == near(6.0 * 11 / 12)
    assert collective(costs(4, 3, gather=9.0, network=6.0).hardware, MODEL) == near(9.0 * 11 / 12)
    slow = costs(4, 3, gather=2.0, network=6.0, adapters=2).hardware
    assert collective(slow, MODEL) == near(6.0 * 11 / 12)
    twice = replace(slow, network=replace(slow.network, adapters=4))
    assert collective(twice, MODEL) == near(3.0 * 11 / 12)
    alone = replace(costs(1, 3, network=6.0).hardware, fabric=None)
    assert collective(alone, MODEL) == near(6.0 * 2 / 3)


def test_each_further_host_adds_a_hop():
    # That of the network, and a pass within the host: half of an all-reduce's latency there.
    for hosts in (1, 2, 5):
        found = collective(costs(2, hosts, latency=0.1).hardware, MODEL)
        assert found == near(0.1 + (hosts - 1) * 0.15)
        assert collective(costs(1, hosts, latency=0.1).hardware, MODEL) == near(
            0.1 * hosts if hosts > 1 else 0.0
        )


def test_what_leaves_a_host_shares_its_devices_links():
    # Both ways of a link of 8 s a model, a quarter of the ring's bytes on each of four.
    hardware = costs(4, 2, link=8.0).hardware
    assert collective(hardware, MODEL) == near(8.0 * 7 / 8 / 4)
    assert collective(replace(hardware, num_hosts=1), MODEL) < 1e-6


def test_a_copy_to_the_host_and_what_leaves_for_others_share_a_link():
    # One device a host: half a model to the other, 4 s of the link, beside a copy of 8 s.
    machine = Machine(costs(1, 2, link=8.0).hardware)
    started = machine.env.event()
    started.succeed()
    gathered = machine.collective("all-gather", MODEL, 1, started)
    copied = machine.d2h.submit("grads", 1, machine.down(MODEL), [started])
    machine.env.run(gathered)
    assert machine.env.now == near(8.0)
    machine.env.run(copied)
    assert machine.env.now == near(12.0)


# ---- sharded weights, by sums that can be done by hand ------------------------------------------


def test_hidden_collectives_show_the_first_gather_and_the_last_reduction():
    # A layer is gathered in 0.1 s, behind forwards of 1 s and backwards of 2 s.
    found = costs(2, gather=2.0, on_device=6.0)
    assert step(found, "fsdp2") == near(10 + 20 + 0.1 + 0.1 + 6 / 2)
    assert stalls(found, "fsdp2") == pytest.approx({"gather": 0.1, "reduce": 0.1}, abs=1e-6)


def test_a_forward_is_bound_by_its_all_gathers():
    # 2 s a layer: forward goes at their pace, one layer's work behind the last. Backward does
    # too: an all-gather of each layer but the last, and a reduction of each.
    found = costs(2, gather=40.0)
    forward = LAYERS * 2 + 1
    assert step(found, "fsdp2") == near(forward + (2 * LAYERS - 1) * 2)
    # Kept from forward on, weights leave backward its reductions: as long as it takes itself.
    assert step(found, "fsdp2", reshard_after_forward=False) == near(forward + 20 + 2)


@pytest.mark.parametrize("gather", [2.0, 10.0, 40.0, 200.0])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_pass_takes_the_longer_of_its_work_and_its_collectives(gather, accumulation):
    found = costs(2, gather=gather, accumulation=accumulation)
    took = step(found, "fsdp2") / accumulation
    each = gather / LAYERS / 2
    least = max(10, LAYERS * each) + max(20, (2 * LAYERS - 1) * each)
    # What shows at either end of a pass: a layer's work and two of its collectives.
    assert least <= took <= least + 2 + 2 * each + 1e-6


def test_prefetch_hides_what_would_show_and_a_second_layer_ahead_helps_no_more():
    found = costs(2, gather=10.0)  # 0.5 s a layer
    without = step(found, "fsdp2", prefetch=0)
    # Every all-gather shows, and in backward the reduction before it too.
    assert without == near(10 + 20 + LAYERS * 0.5 + (LAYERS - 1) * (0.5 + 0.5) + 0.5)
    one, two = (step(found, "fsdp2", prefetch=count) for count in (1, 2))
    assert one == near(10 + 20 + 0.5 + 0.5)
    assert two == near(one)


def test_more_layers_ahead_help_where_layers_differ():
    found = costs(2, gather=20.0)  # 1 s a layer
    short = [replace(s, forward=0.1 if i % 2 else 1.9) for i, s in enumerate(found.segments)]
    uneven = replace(found, segments=tuple(short))
    one, two = (step(uneven, "fsdp2", prefetch=count) for count in (1, 2))
    assert two < one - 1


def test_offload_does_its_update_in_turn():
    # Shares of a half: 5 s of copies, 15 s of the host's update.
    found = costs(2, gather=2.0, link=5.0, update=30.0)
    ends = 0.1 + 0.1  # first gather, last reduction
    # 28 bytes in 15 s. In the model's type AdamW moves half of that, and in a loop 88 for 28.
    # Layers come up one by one: 0.25 s before the first; the last one's gradients go down.
    narrow = {"float32_master": False}
    fused = step(found, "fsdp2_offload", optimizer="fused", **narrow)
    assert fused == near(10 + 20 + ends + 0.25 + 0.25 + 15 / 2)
    assert step(found, "fsdp2_offload", **narrow) == near(fused + (88 - 28) / 28 * 15 / 2)
    wide = step(found, "fsdp2_offload", optimizer="fused")
    assert wide == near(10 + 20 + ends + 0.5 + 0.5 + 15)


def test_stage_3_does_deepspeeds_step():
    found = costs(2, gather=2.0, link=10.0, update=30.0)
    # AdamW moves 28 bytes in 15 s, the passes around it 14 as fast. New weights come up in 5 s.
    around = 10 + 20 + 0.1 + 15 + 7.5 + 5
    # A layer's gradients are reduced, go down, up, and down in float32. Backward waits for that
    # bucket by bucket, however many there are, or goes on and waits for the last layer's.
    copied = 0.1 + 0.5 + 0.5 + 1.0
    whole = around + LAYERS * copied
    assert step(found, "zero3_offload", bucket_elements=1) == near(whole)
    assert step(found, "zero3_offload") == near(whole)
    beside = step(found, "zero3_offload", bucket_elements=1, waits_for_copies=False)
    assert beside == near(around + copied)
    # With all on the host layers come up instead.
    offloaded = step(found, "zero3_offload", offload="all")
    assert offloaded == near(whole - 5 + 0.5)


def test_reductions_in_float32_move_twice_the_bytes():
    found = costs(2)
    narrow, wide = (predict(found, "fsdp2", float32_reduce=f).fabric_bytes for f in (False, True))
    assert wide - narrow == near(MODEL / 2)


def test_all_reduces_of_ddp_run_behind_backward_but_for_the_last():
    # 0.1 s for each pass of a layer, twice in an all-reduce; every device updates everything.
    found = costs(2, gather=2.0, on_device=6.0)
    assert step(found, "ddp", bucket_bytes=1) == near(10 + 20 + 2 * 0.1 + 6)
    assert step(found, "ddp", bucket_bytes=MODEL) == near(10 + 20 + 2 * 1.0 + 6)


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
@pytest.mark.parametrize(("optimizer", "moved"), [("fused", 28), ("foreach", 80), ("loop", 80)])
def test_adamw_in_the_models_type_moves_half(name, optimizer, moved):
    devices = 2 if name == "fsdp2" else 1  # which update a half each
    wide, narrow = (
        predict(costs(devices, on_device=6.0), name, optimizer=optimizer, float32_master=is_wide)
        for is_wide in (True, False)
    )
    assert wide.update_seconds == near(6 / devices * moved / 28)
    assert narrow.update_seconds == near(3 / devices * moved / 28)


def test_deepspeed_has_masters_whatever_it_offloads():
    found = costs(2, on_device=6.0)
    assert predict(found, "deepspeed_zero3").update_seconds == near(3)


def test_adamw_on_few_cores_is_bound_by_its_arithmetic_in_16_bits_alone():
    # A device's half: 7 bytes of an element in 14 s, and in 7 s without masters.
    found = costs(2, update=28.0)
    threads = found.hardware.threads_per_device
    for seconds in (6.0, 10.0):
        slow = found.hardware.with_values({"host.core_update": PARAMS / 2 / seconds / threads})
        held = replace(found, hardware=slow)
        busy = {
            is_wide: predict(
                held, "fsdp2_offload", optimizer="fused", float32_master=is_wide
            ).busy_seconds["host"]
            for is_wide in (True, False)
        }
        assert busy == {True: near(14), False: near(max(7, seconds))}


@pytest.fixture
def small_buckets(monkeypatch):
    """Let each layer be a bucket of DDP."""
    monkeypatch.setattr(ddp, "FIRST_BUCKET_BYTES", 1)
    monkeypatch.setattr(ddp, "BUCKET_BYTES", 1)


NETWORKS = [(2, 1), (8, 1), (2, 3), (1, 4)]
"""Devices of a host, and hosts."""


def by_fabric_or_network(seconds, hosts):
    """Return the costs of passing a model over what a ring's slowest link is."""
    return {"gather": seconds} if hosts == 1 else {"network": seconds}


@pytest.mark.parametrize(("devices", "hosts"), NETWORKS)
def test_averages_of_released_gradients_show_where_they_are_slower_than_backward(
    devices, hosts, small_buckets
):
    ring = 1 - 1 / (devices * hosts)
    for seconds in (2.0, 80.0):  # of a layer 0.4 s and 16 s, in two passes, for 2 s of backward
        found = costs(devices, hosts, **by_fabric_or_network(seconds, hosts))
        each = 2 * seconds / LAYERS * ring
        expected = 10 + 20 + each if each < 2 else 10 + 2 + LAYERS * each
        settings = {"parallel": "ddp", "select_interval": 0}
        assert step(found, "zenflow", topk_ratio=1.0, **settings) == near(expected)
        assert stalls(found, "zenflow", **settings)["reduce"] >= expected - 30 - 1e-6


@pytest.mark.parametrize(("devices", "hosts"), NETWORKS)
def test_released_gradients_leave_behind_the_backward_of_the_next_bucket(
    devices, hosts, small_buckets
):
    # Only the last layer's copy shows, of ten. The upload goes in one, and is gathered in a pass.
    count = devices * hosts
    found = costs(devices, hosts, **by_fabric_or_network(8.0, hosts), link=2.0)
    ring, layer = 1 - 1 / count, 2.0 / LAYERS / count
    average, in_turn = 2 * 8.0 / LAYERS * ring, 2.0 / count + 8.0 * ring
    knobs = {"parallel": "ddp", "min_split_elements": 0, "select_interval": 0}
    for releases, copied in ((True, layer), (False, LAYERS * layer)):
        took = step(found, "zero_offload", releases=releases, **knobs)
        assert took == near(30 + average + copied + in_turn)


def test_the_default_buckets_are_small_at_first_and_then_large():
    # A layer has 2 MB: the first is a bucket, and the other nine are one, below 25 MiB.
    assert ddp.buckets_of(costs()) == [[9], [8, 7, 6, 5, 4, 3, 2, 1, 0]]
    found = costs(2, gather=2.0)
    assert step(found, "zenflow", parallel="ddp", topk_ratio=1.0) == near(30 + 0.9 * 2.0)
    assert ddp.buckets_of(costs(), MODEL // 5) == [[9, 8], [7, 6], [5, 4], [3, 2], [1, 0]]


@pytest.mark.parametrize("name", ["zenflow", "zenflow_paper", "zero_offload"])
def test_each_device_does_what_one_device_does_under_ddp(name):
    # Columns are measured and weights moved as a whole on each; only what is sent is divided.
    slow = {"device.bandwidth": 20.0 * PARAMS / 5, "overheads.intake_bandwidth": MODEL / 3}
    busy = []
    for devices in (1, 2, 8):
        found = costs(devices, on_device=6.0)
        found = replace(found, hardware=found.hardware.with_values(slow))
        busy.append(predict(found, name, parallel="ddp", **ENGINE).busy_seconds["device"])
    assert busy == [near(busy[0])] * 3


def test_a_model_cut_finer_is_gathered_by_layers():
    name, config = find_model("llama-2-7b")
    work = Workload.of_config(name, {**config, "num_hidden_layers": 4})
    found = costs_of(work, find_machine("dgx-a100-80", 8))
    assert len(found.segments) > len(work.layers)
    assert len(layers_of(found)) == len(work.layers)


# ---- limits -------------------------------------------------------------------------------------

ONE = [
    ("fsdp2", {}, "published_on_device", {}),
    ("ddp", {}, "published_on_device", {}),
    *(
        (name, {"parallel": "fsdp", "releases": releases}, name, {"releases": releases})
        for name in PRESETS
        for releases in (True, False)
    ),
]


@pytest.mark.parametrize(("name", "options", "other", "others"), ONE)
def test_one_device_is_what_it_is_alone(name, options, other, others):
    found = costs(1, link=10.0, update=30.0, on_device=6.0, gather=5.0)
    ours, theirs = predict(found, name, **options), predict(found, other, **others)
    assert ours.timeline.spans == theirs.timeline.spans
    assert (ours.step_seconds, ours.stall_seconds) == (theirs.step_seconds, theirs.stall_seconds)


SHARDED = ["fsdp2", "fsdp2_offload", "zero3_offload"]


WAYS = [
    ("ddp", {}),
    *((name, {"reshards": reshards}) for name in SHARDED for reshards in (True, False)),
    *(
        (name, {"select_interval": 0, "releases": releases, **way})
        for name in PRESETS
        for releases in (True, False)
        for way in ({}, {"parallel": "fsdp"}, {"parallel": "fsdp", "reshards": False})
    ),
]


@pytest.mark.parametrize(
    ("name", "given", "devices", "hosts"),
    [
        pytest.param(*way, *machine, marks=() if place % 3 == index else pytest.mark.slow)
        for place, way in enumerate(WAYS)
        for index, machine in enumerate([(2, 3), (4, 1), (1, 4)])
    ],
)
def test_with_endless_networks_links_and_hosts_a_step_is_its_compute(name, given, devices, hosts):
    found = costs(devices, hosts, accumulation=2)
    assert step(found, name, **given) == near(2 * 30)


@pytest.mark.parametrize(("name", "given"), WAYS)
def test_a_step_is_the_devices_work_and_its_stalls(name, given):
    found = costs(
        2, 3, gather=8.0, network=30.0, link=30.0, update=80.0, on_device=6.0, accumulation=2
    )
    predicted = predict(found, name, **given)
    took = predicted.busy_seconds["device"] + predicted.stall_seconds
    assert took == near(predicted.step_seconds)
    assert sum(stalls(found, name, **given).values()) == pytest.approx(
        predicted.stall_seconds, abs=1e-6
    )


# ---- bytes --------------------------------------------------------------------------------------

LAST = MODEL / LAYERS
"""Bytes of the layer that stays gathered from forward to backward."""


@pytest.mark.parametrize(("devices", "hosts"), [(2, 1), (8, 1), (2, 4)])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_bytes_of_every_collective(devices, hosts, accumulation):
    found = costs(devices, hosts, accumulation=accumulation)
    ring = 1 - 1 / (devices * hosts)
    three, two = 3 * MODEL - LAST, 2 * MODEL
    for name in SHARDED:
        for reshards, each in ((True, three), (False, two)):
            moved = predict(found, name, reshards=reshards).fabric_bytes
            assert moved == near(accumulation * ring * each), (name, reshards)
    # Whole weights are reduced once a step.
    assert predict(found, "ddp").fabric_bytes == near(ring * 2 * MODEL)


@pytest.mark.parametrize(("devices", "hosts"), [(2, 1), (2, 4)])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_gradients_are_reduced_and_leave_once_if_they_wait_for_the_last(
    devices, hosts, accumulation
):
    found = costs(devices, hosts, update=28.0, accumulation=accumulation)
    share = 1 / (devices * hosts)
    for name in ("fsdp2", "fsdp2_offload"):
        waiting = predict(found, name, sync_each_batch=False)
        gathered = accumulation * (2 * MODEL - LAST)
        assert waiting.fabric_bytes == near((1 - share) * (gathered + MODEL)), name
        if name != "fsdp2":
            assert waiting.d2h_bytes == near(2 * share * MODEL)  # in float32
            assert waiting.busy_seconds["host"] == near(share * 88)  # of a loop


def test_sizes_of_deepspeeds_stage_3_are_numbers_of_elements():
    for option in ("bucket_elements", "sub_group_elements"):
        with pytest.raises(ConfigError, match=f"{option} must be at least 1"):
            predict(costs(2), "deepspeed_zero3", **{option: 0})


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize(("devices", "hosts"), [(2, 1), (2, 2)])
def test_bytes_of_offload(devices, hosts, accumulation):
    found = costs(devices, hosts, update=28.0, accumulation=accumulation)
    share = 1 / (devices * hosts)
    gathered = accumulation * (2 * MODEL - LAST)
    for width, options in ((4, {}), (2, {"float32_master": False})):
        predicted = predict(found, "fsdp2_offload", **options)
        assert predicted.d2h_bytes == near(accumulation * share * width * PARAMS)
        assert predicted.h2d_bytes == near(share * width / 2 * gathered)
        # A second for each byte of an element: 88 in AdamW, 12 in each sum but the first.
        moved = (88 + 12 * (accumulation - 1)) * width / 4
        assert predicted.busy_seconds["host"] == near(share * moved)
    for options, up in (({}, MODEL), ({"offload": "all"}, gathered)):
        predicted = predict(found, "zero3_offload", **options)
        # Every micro-batch's go down and up once, and the last one's down in float32.
        assert predicted.d2h_bytes == near(share * (accumulation + 2) * MODEL)
        assert predicted.h2d_bytes == near(share * (accumulation * MODEL + up))


ENGINE = {"min_split_elements": 0, "topk_ratio": 0.5, "update_interval": 2, "select_interval": 0}


@pytest.mark.parametrize(("devices", "hosts"), [(2, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("releases", [True, False])
def test_devices_divide_the_hosts_update(devices, hosts, releases):
    count = devices * hosts
    one = predict(costs(1, update=30.0), "zenflow", **ENGINE)
    for parallel in ("ddp", "fsdp"):
        found = costs(devices, hosts, update=30.0)
        many = predict(found, "zenflow", parallel=parallel, releases=releases, **ENGINE)
        assert many.d2h_bytes == near(one.d2h_bytes / count)
        assert many.h2d_bytes == near(one.h2d_bytes / count)
        assert many.busy_seconds["host"] == near(one.busy_seconds["host"] / count)
        ring = 1 - 1 / count
        landed = 0.5 * MODEL / 2  # half of all columns, once in two steps
        norms = 2 * 4 * COLUMNS
        each = {"ddp": 2 * MODEL + landed, "fsdp": 3 * MODEL - LAST + norms}
        assert many.fabric_bytes == near(ring * each[parallel])


def test_zenflow_hides_under_fsdp_what_offload_shows():
    # Each of four hosts' workers has 30 / 4 s of update for a step of 30 s.
    found = costs(4, gather=2.0, link=10.0, update=30.0)
    offload = step(found, "zero3_offload")
    ours = step(found, "zenflow", parallel="fsdp", **{**ENGINE, "topk_ratio": 0.1})
    assert offload > 30 + 30 / 4
    assert ours < 30.6


# ---- memory -------------------------------------------------------------------------------------


def parts(need, place):
    return {part.name: part.num_bytes for part in need.parts if part.place == place}


@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.parametrize(("devices", "hosts"), [(8, 1), (4, 2), (8, 4)])
def test_devices_and_hosts_hold_a_model_and_its_states_once(name, devices, hosts):
    work = Workload.of_config(*find_model("llama-2-7b"))
    need = memory_of(work, name, find_machine("dgx-a100-80", devices, num_hosts=hosts))
    total = devices * hosts
    assert need.num_devices == total
    device, host = parts(need, "device"), parts(need, "pageable")
    pinned = parts(need, "pinned")
    if name == "fsdp2":  # its weights are the masters
        held = total * (device["weights"] + device["moments"])
    elif name == "fsdp2_offload":
        held = hosts * (pinned["weights"] + host["moments"])
        assert hosts * pinned["gradients"] == near(4 * work.num_params)
    else:
        held = hosts * host["optimizer state"]
        assert hosts * pinned["float gradients"] == near(4 * work.num_params)
        assert total * device["weights"] == near(2 * work.num_params)
    assert held == near(STATE_BYTES * work.num_params)
    layer = max(item.numel for item in work.layers)
    tables = work.layers[0].numel + work.layers[-1].numel
    if name != "zero3_offload":  # it keeps what backward uses again soon
        assert device["layers in use"] == near(2 * (2 * layer + tables))
    assert host["processes"] == near(devices * PROCESS_BYTES)


def test_without_resharding_all_weights_are_whole():
    work = Workload.of_config(*find_model("llama-2-7b"))
    strategy = Strategy.of("fsdp2", reshards=False)
    need = memory_of(work, strategy, find_machine("dgx-a100-80", 8))
    assert parts(need, "device")["layers in use"] == near(2 * work.num_params)


def test_a_model_of_70_billion_fits_eight_devices_sharded_and_not_whole():
    work = Workload.of_config(*find_model("llama-3.1-70b"), checkpointing=True)
    # All of its states on the devices are 106 GB on each of eight, beside its weights.
    one, two = (find_machine("hgx-h200", num_hosts=hosts) for hosts in (1, 2))
    fits = {
        (name, parallel, machine.num_hosts): not memory_of(
            work, Strategy.of(name, parallel=parallel), machine
        ).fits(machine)
        for name in ("zenflow", "on_device")
        for parallel in ("ddp", "fsdp")
        for machine in (one, two)
    }
    assert fits == {
        ("zenflow", "ddp", 1): False,
        ("zenflow", "ddp", 2): False,
        ("zenflow", "fsdp", 1): True,
        ("zenflow", "fsdp", 2): True,
        ("on_device", "ddp", 1): False,
        ("on_device", "ddp", 2): False,
        ("on_device", "fsdp", 1): False,
        ("on_device", "fsdp", 2): True,
    }


def test_the_engines_host_state_is_divided_among_ranks():
    work = Workload.of_config(*find_model("llama-2-7b"))
    alone = memory_of(work, Strategy.of("zenflow", queue_depth=4), find_machine("dgx-a100-80", 1))
    whole = parts(alone, "pageable")["optimizer state"]
    for parallel in ("ddp", "fsdp"):
        strategy = Strategy.of("zenflow", parallel=parallel, queue_depth=4)
        need = memory_of(work, strategy, find_machine("dgx-a100-80", 4, num_hosts=2))
        assert 2 * parts(need, "pageable")["optimizer state"] == near(whole)
        staging = parts(need, "pinned")["gradient staging"]
        assert 2 * staging == near(parts(alone, "pinned")["gradient staging"])
    states = parts(need, "device")["optimizer state"]
    assert 8 * states == near(parts(alone, "device")["optimizer state"])


# ---- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prefetch": -1}, "prefetch is a number of layers >= 0"),
        ({"optimizer": "apex"}, "optimizer 'apex' is unknown"),
    ],
)
def test_an_option_out_of_its_range_is_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        predict(costs(), "fsdp2", **options)


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("zenflow", {"parallel": "tensor"}, "parallel 'tensor'"),
        ("zenflow", {"reshards": False}, "give parallel fsdp as well"),
        ("published_on_device", {"parallel": "fsdp"}, "shares a model in its own way"),
        ("published_on_device", {"reshards": False}, "does not take reshard_after_forward"),
    ],
)
def test_a_way_to_share_a_model_that_a_strategy_does_not_have_is_refused(name, given, words):
    with pytest.raises(ConfigError, match=words):
        Strategy.of(name, **given)


def test_hosts_need_a_network():
    with pytest.raises(ConfigError, match="several hosts need a network"):
        replace(costs(2, 2).hardware, network=None)
    with pytest.raises(ConfigError, match="several hosts need a network"):
        find_machine("l40s-server", num_hosts=2)
