"""What a step of each strategy takes, against sums that can be done by hand."""

from dataclasses import replace

import pytest

from sim.hardware.catalog import find_machine
from sim.hardware.components import Fabric, Nvme
from sim.hardware.quantity import Quantity
from sim.machine import Machine, least_seconds
from sim.models.table import find_model
from sim.models.workload import Workload
from sim.schedules.intake import ExactIntake
from sim.schedules.systems.deep_optimizer_states import DeepOptimizerStates
from sim.schedules.systems.deepspeed_zero_offload import RELEASED, host_seconds, step_rate
from sim.simulate import STRATEGIES, SYSTEMS, Strategy, simulate
from sim.timing.block_plan import BlockPlan
from sim.timing.costs import costs_of
from sim.timing.host_passes import HostPass, window_passes
from sim.timing.phases import costs_of_phases
from zenflow.config import ZenFlowConfig
from zenflow.errors import ConfigError
from zenflow.presets import ZERO_INFINITY

ANYWHERE = [name for name in STRATEGIES if name != ZERO_INFINITY]
"""Strategies for any number of devices, on machines without drives too."""

LAYERS = 10
PARAMS = 10_000_000
"""In square matrices of a million: a thousand columns in each."""
MODEL = 2 * PARAMS
"""Bytes in 16 bits."""

LLAMA_7B = {"forward": 0.045, "backward": 2.0, "d2h": 0.5, "update": 4.6, "h2d": 0.5}
"""Lan et al. 2025 (arXiv 2505.12242), on four A100s: the breakdown behind ZenFlow's design."""

ENDLESS = 1e-9
"""Seconds of a phase that takes none."""


def costs(
    forward=10.0, backward=20.0, d2h=10.0, update=30.0, h2d=10.0, *,
    layers=LAYERS, accumulation=1, devices=1, gather=ENDLESS, read=ENDLESS, write=ENDLESS,
    on_device=ENDLESS, fabric="NVLink",
):  # fmt: skip
    """Return costs by the seconds of each phase; the last four of the whole model as well."""
    found = costs_of_phases(
        forward=forward, backward=backward, d2h=d2h, update=update, h2d=h2d,
        num_params=PARAMS, num_layers=layers,
    )  # fmt: skip
    hardware = replace(
        found.hardware.with_values({"overheads.device_update": PARAMS / on_device}),
        num_devices=devices,
        fabric=Fabric(name=fabric, bandwidth=Quantity(value=MODEL / gather), latency=tiny()),
        nvme=Nvme(
            name="drives",
            read=Quantity(value=12 * PARAMS / read),
            write=Quantity(value=12 * PARAMS / write),
            capacity=Quantity(value=1e18),
        ),
    )
    return replace(found, hardware=hardware, accumulation=accumulation)


def tiny():
    return Quantity(value=1e-12)


def predict(costs, name, **options):
    return simulate(costs, Strategy.of(name, **options))


def step(costs, name, **options):
    return predict(costs, name, **options).step_seconds


def near(seconds):
    return pytest.approx(seconds, rel=1e-6)


# ---- published figures --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "seconds", "stalled"),
    [
        ("published_on_device", 2.045, 0.0),
        ("published_zero_offload", 7.145, 5.100),  # 2045 + 4600 + 500
        ("published_delayed", 4.600, 2.555),  # 4600 - 2045
        ("zenflow_paper", 2.045, 0.0),
    ],
)
def test_the_published_breakdown_of_llama_2_7b(strategy, seconds, stalled):
    predicted = predict(costs_of_phases(**LLAMA_7B, num_params=6_738_415_616), strategy)
    assert predicted.step_seconds == pytest.approx(seconds, rel=0.01)
    assert predicted.stall_seconds == pytest.approx(stalled, rel=0.01, abs=0.01 * seconds)


def test_zenflow_needs_a_window_in_which_the_host_can_hide():
    # The update and the 1/S of it that crosses the link take 4600 x 0.9 ms and more: two steps of
    # 2045 ms are too few, three are enough.
    llama = costs_of_phases(**LLAMA_7B, num_params=6_738_415_616)
    times = {s: step(llama, "zenflow_paper", update_interval=s) for s in (1, 2, 3, 4)}
    assert times[1] > times[2] > 1.05 * 2.045
    # With three the last gradients of backward wait a little for room on the host.
    assert times[3] == pytest.approx(2.045, rel=0.05)
    assert times[4] == pytest.approx(2.045, rel=0.01)


# ---- closed forms -------------------------------------------------------------------------------


def test_on_device_is_forward_and_backward_and_the_update():
    assert step(costs(on_device=3.0), "published_on_device") == near(10 + 20 + 3)
    assert step(costs(on_device=3.0), "on_device") == near(10 + 20 + 3)


def test_zero_offload_is_the_sum_of_its_parts():
    # The first layer's gradient leaves when backward has ended: a tenth of the copies shows.
    assert step(costs(), "published_zero_offload") == near(10 + 20 + 10 / 10 + 30 + 10)
    # Where copies take longer than backward they begin with its first layer's end.
    assert step(costs(d2h=50), "published_zero_offload") == near(10 + 20 / 10 + 50 + 30 + 10)


def test_released_zero_offload_copies_floats_and_passes_over_them_again():
    passes = 30 * (8 + 28 + 6) / 28
    # Copies are on the stream that computes, unless they have that of reductions.
    assert step(costs(), "deepspeed_zero_offload") == near(10 + 20 + 2 * 10 + passes + 10)
    beside = step(costs(), "deepspeed_zero_offload", overlap_comm=True)
    assert beside == near(10 + 20 + 2 * 10 / 10 + passes + 10)


def test_the_engines_zero_offload_updates_as_gradients_arrive():
    # The host begins at the boundary, while the first layer's gradient is still on its way.
    assert step(costs(), "zero_offload", min_split_elements=0) == near(10 + 20 + 30 + 10)


@pytest.mark.parametrize("update", [1.0, 20.0, 29.0])
def test_a_delayed_update_behind_a_longer_step_costs_nothing(update):
    # The engine can't change a layer's weights before its last backward: the first layer's upload
    # shows.
    found = costs(update=update, d2h=ENDLESS, h2d=5.0)
    for name, stall in (("published_delayed", 0.0), ("delayed", 5 / 10)):
        predicted = predict(found, name)
        assert predicted.step_seconds == near(30 + stall)
        assert predicted.stall_seconds == pytest.approx(stall, abs=1e-6)


def test_a_delayed_update_longer_than_the_step_sets_the_pace():
    found = costs(update=100.0, d2h=ENDLESS, h2d=ENDLESS)
    assert step(found, "published_delayed") == near(100)
    assert step(found, "delayed") == near(100)
    found = costs(d2h=50.0, update=ENDLESS, h2d=ENDLESS)  # nor do copies run ahead of it
    assert step(found, "published_delayed") == near(50)
    assert step(found, "delayed") == near(50)


def test_zenflow_waits_for_no_more_than_the_first_layers_upload():
    # 0.9 of a layer's weights once in four steps; 1 s would be all of them.
    predicted = predict(costs(), "zenflow", min_split_elements=0, select_interval=0)
    assert predicted.step_seconds == near(30 + 0.9 / 4)
    assert predicted.stall_seconds == near(0.9 / 4)


def test_a_host_too_slow_for_any_window_sets_zenflows_pace():
    # One pass for the four gradients of a window: 24 + 4 x 2 + 2 bytes for 0.9 of all elements;
    # the update takes 300 s for 28.
    found = replace(costs(update=300.0), intake_factor=1.0)

    def zenflow(**knobs):
        return step(found, "zenflow", min_split_elements=0, **knobs)

    each = 0.9 * 300 / 28 / 4
    assert zenflow() == pytest.approx(34 * each, rel=1e-3)
    # A pass for each of them, or for three, when the queue is full, and for the last one.
    assert zenflow(queue_depth=1) == pytest.approx((3 * 26 + 28) * each, rel=1e-3)
    assert zenflow(queue_depth=3) == pytest.approx((30 + 28) * each, rel=1e-3)
    # The window's sum instead: written 4 + 2 at first, 8 + 2 then, and read at the end.
    paper = step(found, "zenflow_paper", min_split_elements=0)
    assert paper == pytest.approx((2 + 4 + 3 * (2 + 8) + 24 + 4 + 2) * each, rel=1e-3)


def test_arithmetic_bounds_a_pass_over_many_gradients():
    # An element's AdamW step takes as long as 20 bytes: more than a fourth of 34, less than 28.
    found = costs(update=300.0)
    rate = found.hardware.host.core_bandwidth.value / 20
    found = replace(found, hardware=found.hardware.with_values({"host.core_update": rate}))
    each = 0.9 * 300 / 28 / 4
    for depth, work in ((4, 80), (2, 2 * 40), (1, 3 * 26 + 28)):
        knobs = {"min_split_elements": 0, "queue_depth": depth}
        assert step(found, "zenflow", **knobs) == pytest.approx(work * each, rel=1e-3)


def test_compact_state_moves_fewer_bytes_and_is_coded_once_in_a_pass():
    found = costs(update=300.0)
    each = 0.9 * 300 / 28 / 4

    def zenflow(**knobs):
        return step(found, "zenflow", min_split_elements=0, host_state="compact", **knobs)

    # Where memory binds: 5 bytes and two exponents of 64 elements, read and written.
    state = 2 * (5 + 2 / 64)
    assert zenflow() == pytest.approx((state + 10) * each, rel=1e-3)
    assert zenflow(queue_depth=1) == pytest.approx((4 * (state + 2) + 2) * each, rel=1e-3)
    # Where arithmetic does, a step taking as long as 40 bytes.
    rate = found.hardware.host.core_bandwidth.value / 40
    found = replace(found, hardware=found.hardware.with_values({"host.core_update": rate}))
    for depth, coding in ((1, 0.75), (2, 2.8), (4, 0.75)):
        hardware = found.hardware.with_values({"host.compact_coding": coding})
        found = replace(found, hardware=hardware)
        work = 40 * (4 + coding * 4 / depth)
        assert zenflow(queue_depth=depth) == pytest.approx(work * each, rel=1e-3)


@pytest.mark.parametrize("window", [1, 4, 7])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_window_of_compact_state_has_fewer_bytes_and_no_less_arithmetic(depth, window):
    sizes = 2, min(depth, window)
    plain, compact = (
        sum(window_passes(ZenFlowConfig(host_state=name, update_interval=window), *sizes,
                          coding=0.75), start=HostPass())
        for name in ("float32", "compact")
    )  # fmt: skip
    assert compact.num_bytes < plain.num_bytes
    assert compact.steps > plain.steps == window


def test_a_full_pool_makes_room_by_a_pass_over_what_waits():
    # Two layers and S = 8: each block's second gradients have a room where the queue is two deep.
    found = costs(update=300.0, layers=2)
    plan = BlockPlan(found, ZenFlowConfig(min_split_elements=0, queue_depth=2, update_interval=8))
    intake = ExactIntake(plan, found)
    calendar = plan.calendar()
    early, full = [], []
    for number in range(1, 41):
        early.append(sum(intake.stage(index).steps for index in range(2)))
        full.append(sum(work.steps for work in intake.take_in(calendar, number)))
        for block in plan.blocks:
            if calendar.is_due(block.index, number):
                intake.end(block, 1)
                calendar.close(block.index, number)
    # At first all blocks want a second room at once; from then on they take turns.
    assert early[1] > 0
    assert not any(early[16:])
    assert all(full[16:])


def test_the_device_moves_weights_that_land_later_and_no_others():
    # 14 bytes of each element in 7 s: the gradient, a temporary twice, the weight twice. The first
    # layer's last quarter lands with that behind its copy. Measuring rows takes 2 bytes.
    found = costs(update=ENDLESS, d2h=ENDLESS, h2d=ENDLESS)
    slow = {"device.bandwidth": 2.0 * PARAMS}
    found = replace(found, hardware=found.hardware.with_values(slow))
    knobs = {"min_split_elements": 0, "select_interval": 0}
    assert step(found, "zenflow", **knobs) == near(30 + 1 + 7 + 0.7 * 0.9 / 4)
    assert step(found, "zenflow", **knobs, overlap_step=False, update_interval=1) == near(30 + 1)
    assert step(found, "zero_offload", min_split_elements=0) == near(30 + 1)
    for name in ("delayed", "zenflow_paper", "on_device"):
        assert step(found, name, min_split_elements=0) == near(30)


def test_layers_updated_at_once_hide_all_but_the_first_layers():
    # Host, link and update of a layer together take less than the 2 s of its backward.
    found = costs(d2h=4.0, update=8.0, h2d=4.0)
    assert step(found, "layer_overlapped") == near(10 + 20 + (4 + 8 + 4) / 10)


def test_layers_updated_by_a_slow_host_wait_for_all_of_it():
    # It starts with the last layer, 2 s into backward and 1 s of copying later; the next forward
    # begins when the first layer's weights have been uploaded.
    assert step(costs(update=100.0), "layer_overlapped") == near(10 + 2 + 1 + 100 + 1)


def test_superoffload_hides_all_but_the_last_bucket():
    # Floats take twice the copies: 0.4 s of a layer.
    found = costs(d2h=2.0, update=8.0, h2d=2.0)
    assert step(found, "superoffload", ratio=1.0) == near(10 + 20 + (4 + 8 + 4) / 10)


def test_what_has_16_bits_takes_half_of_superoffloads_copies_and_of_its_updates():
    found = costs(d2h=2.0, update=8.0, h2d=2.0)
    narrow = step(found, "superoffload", ratio=1.0, float32_master=False)
    # Floats take 0.4 s of a layer's copies, and 0.8 s of its update.
    assert narrow == near(10 + 20 + (2 + 4 + 2) / 10)
    on_device = costs(d2h=2.0, update=8.0, h2d=2.0, on_device=6.0)
    assert step(on_device, "superoffload", ratio=0.0, float32_master=False) == near(10 + 20 + 3)


def test_torchaos_copies_up_stand_behind_all_copies_down():
    found = costs(d2h=2.0, update=8.0, h2d=2.0)
    assert step(found, "torchao_offload") == near(10 + 20 + 2 / 10 + 2)


def test_superoffload_with_a_share_on_the_device_needs_no_copy_at_the_end():
    # Half of the update on the device: 3 s of 6; the host has done the last five layers by then.
    found = costs(d2h=2.0, update=8.0, h2d=2.0, on_device=6.0)
    assert step(found, "superoffload", ratio=0.5) == near(10 + 20 + 3)
    assert step(found, "superoffload", ratio=0.0) == near(10 + 20 + 6)


def test_superoffload_beats_zero_offload_where_the_host_hides_behind_backward():
    found = costs(d2h=4.0, update=15.0, h2d=4.0)
    assert step(found, "superoffload") < 0.75 * step(found, "published_zero_offload")


def test_clipping_in_superoffload_starts_when_backward_has_ended_and_goes_in_turn():
    found = costs(d2h=4.0, update=8.0, h2d=4.0)
    in_turn = 10 + 20 + 8 + 2 * 4  # the first bucket's gradient has long arrived
    assert step(found, "superoffload", ratio=1.0, clipping=True) == near(in_turn)


def test_with_endless_drives_zero_infinity_is_the_cpus_pipeline():
    # Four tiles; the last one's upload shows.
    options = {"tile": PARAMS // 4}
    assert step(costs(), "published_zero_infinity", **options) == near(10 + 20 + 1 + 30 + 10 / 4)
    cpu_only = step(costs(), "deep_optimizer_states", subgroup=PARAMS // 4, stride=5)
    assert step(costs(), "published_zero_infinity", **options) == near(cpu_only)


def test_published_zero_infinity_with_three_buffers_goes_at_the_pace_of_its_slowest_part():
    # Reading 25 s a tile is the slowest; the last tile is then updated and uploaded.
    found = costs(read=100.0, write=40.0)
    assert step(found, "published_zero_infinity", tile=PARAMS // 4) == near(
        31 + 100 + 30 / 4 + 10 / 4
    )
    # The next step's first read does not wait for writing.
    found = costs(read=100.0, write=400.0, backward=1000.0)
    # Three tiles have buffers at once; the fourth's is free when the first is written.
    total = 10 + 1000 + 1 + (25 + 7.5 + 100) + 25 + 7.5 + 2.5
    assert step(found, "published_zero_infinity", tile=PARAMS // 4) == near(total)


def test_published_zero_infinity_with_one_buffer_does_everything_in_turn():
    found = costs(read=100.0, write=40.0)
    # The last write runs on behind forward and backward.
    total = 31 + 4 * (25 + 7.5) + 3 * 10 + 2.5
    assert step(found, "published_zero_infinity", tile=PARAMS // 4, buffer_count=1) == near(total)


def test_more_buffers_never_slow_zero_infinity():
    found = costs(read=60.0, write=90.0)
    times = [
        step(found, "published_zero_infinity", tile=PARAMS // 8, buffer_count=count)
        for count in (1, 2, 3, 4, 8)
    ]
    assert times == sorted(times, reverse=True)
    assert times[0] > 1.3 * times[2]


def test_interleaved_updates_with_an_endless_link_and_device_cost_nothing():
    found = costs(d2h=ENDLESS, h2d=ENDLESS)
    assert step(found, "deep_optimizer_states", subgroup=PARAMS // 10) == near(30)


@pytest.mark.parametrize("stride", [6, 7, 100])
def test_a_stride_beyond_the_sub_groups_leaves_all_to_the_host(stride):
    found = step(costs(), "deep_optimizer_states", subgroup=PARAMS // 5, stride=stride)
    assert found == near(10 + 20 + 1 + 30 + 10 / 5)


def test_every_second_sub_group_on_the_device_halves_the_hosts_work():
    # Ten sub-groups: five updates of 3 s on the host. A state's 12 bytes are six times a weight's:
    # 0.6 s for each, up, then down while the next one comes. The last weights take 0.1 s.
    found = costs(d2h=1.0, h2d=1.0)
    seconds = step(found, "deep_optimizer_states", subgroup=PARAMS // 10, stride=2)
    assert seconds == near(10 + 20 + 0.1 / 2 + 15 + 0.1)


def test_all_on_the_device_is_bound_by_the_states_way_up_and_down():
    # Two sub-groups of 6 s each way fit at once: up, updated for 1 s, down; the third comes when
    # the first has gone. 6 + 6 | 1 | 6 + ...: up 1 at 0-6, down 1 at 7-13, up 2 at 6-12, down 2 at
    # 13-19, up 3 from 13, done at 19 and 20.
    found = costs(on_device=3.0, d2h=3.0, h2d=3.0, layers=10)
    seconds = step(found, "deep_optimizer_states", subgroup=-(-PARAMS // 3), stride=1)
    assert seconds == pytest.approx(10 + 20 + 20, rel=1e-3)


@pytest.mark.parametrize("link", [0.1, 1.0, 3.0, 10.0, 100.0])
@pytest.mark.parametrize("on_device", [ENDLESS, 10.0])
def test_the_stride_that_is_chosen_is_near_the_best_one(link, on_device):
    found = costs(d2h=link, h2d=link, on_device=on_device)
    options = {"subgroup": PARAMS // 20}
    chosen = step(found, "deep_optimizer_states", **options)
    each = [step(found, "deep_optimizer_states", stride=s, **options) for s in range(1, 22)]
    assert chosen <= 1.1 * min(each)


def test_the_stride_widens_with_a_slower_link():
    strides = []
    for link in (1e-3, 2.0, 5.0, 20.0, 1000.0):
        found = costs(d2h=link, h2d=link)
        schedule = DeepOptimizerStates(Machine(found.hardware), found, subgroup=PARAMS // 20)
        strides.append(schedule.stride)
    assert strides == sorted(strides)
    assert (strides[0], strides[-1]) == (1, 21)


def test_released_zenflow_without_overlap_does_all_of_a_boundary_in_turn():
    # S = 1: the gradients go down in 16 bits and as floats, 3 bytes for 1 of a copy; AdamW on the
    # device for a tenth; a product in place, AdamW, a cast; the upload.
    found = costs(on_device=20.0)
    host = 30 * (8 + 28 + 6) / 28
    # Backward waits for each of its copies.
    seconds = step(found, "deepspeed_zenflow", update_interval=1, overlap=False)
    assert seconds == near(10 + 20 + 30 + host + 10 + 0.1 * 20)


def test_released_zenflow_ends_its_windows_in_turn_behind_which_the_update_runs():
    # S = 2, copies of no time. Half of the cores cast the last weights and clip, at a boundary;
    # the other half updates from then on: 69 s, behind a selective update (2 s), a step of 32 s
    # and one of 30. The next boundary waits for the rest.
    found = costs(d2h=ENDLESS, h2d=ENDLESS, on_device=20.0)
    serial = 2 * 30 * (6 + 8) / 28
    update = 2 * 30 * 32 / 28
    predicted = predict(found, "deepspeed_zenflow", update_interval=2)
    assert predicted.step_seconds == near((serial + update) / 2)
    assert predicted.slowest_step_seconds == near(30 + (update - 64) + serial + 2)
    assert predicted.stall_seconds == near((update - 64 + serial) / 2)


def test_released_zenflow_hides_no_copy_behind_backward():
    # The sum comes up (10 s; not in the first micro-batch), the new one goes down (10 s). At the
    # boundary the float copy is 20 s more, and the upload 10 s.
    found = costs(update=ENDLESS)
    window = (30 + 10) + (30 + 20) + (30 + 20 + 20 + 10)
    assert step(found, "deepspeed_zenflow", update_interval=3) == near(window / 3)


def test_released_zenflow_copies_through_pageable_memory_what_its_processes_share():
    # A quarter of the link's rate: the upload takes 40 s, and with overlap the float gradients 80.
    found = costs(update=ENDLESS)
    found = replace(found, hardware=found.hardware.with_values({"link.pageable": 0.25}))
    window = (30 + 10) + (30 + 20 + 40)
    seconds = step(found, "deepspeed_zenflow", update_interval=2)
    assert seconds == near((window + 80) / 2)
    seconds = step(found, "deepspeed_zenflow", update_interval=2, overlap=False)
    assert seconds == near((window + 20) / 2)


# ---- limits, and what holds for all of them -----------------------------------------------------


@pytest.mark.parametrize("name", ANYWHERE)
@pytest.mark.parametrize("accumulation", [1, 3])
def test_with_endless_links_and_hosts_a_step_is_its_compute(name, accumulation):
    found = costs(d2h=ENDLESS, update=ENDLESS, h2d=ENDLESS, accumulation=accumulation)
    again = 10 if name == "megatrain" else 0  # its backward computes every layer's input first
    assert step(found, name) == near((30 + again) * accumulation)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in ANYWHERE),
        ("published_zero_infinity", {"tile": PARAMS // 40}),
        ("deep_optimizer_states", {"subgroup": PARAMS // 40, "stride": 2}),
        ("superoffload", {"clipping": True}),
    ],
)
@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_step_is_the_devices_work_and_its_stalls_by_cause(name, options, devices, accumulation):
    found = costs(
        d2h=30.0, h2d=40.0, update=80.0, on_device=6.0, gather=8.0, read=20.0, write=20.0,
        devices=devices, accumulation=accumulation,
    )  # fmt: skip
    # A later selection is counted in by its share, and is in no timeline.
    options = options if name in SYSTEMS else {"select_interval": 0}
    predicted = predict(found, name, **options)
    stalls = predicted.timeline.stalls()
    steps = len({span.step for span in predicted.timeline.spans if span.lane == "device"})
    assert predicted.busy_seconds["device"] + predicted.stall_seconds == near(
        predicted.step_seconds
    )
    assert sum(stalls.values()) / steps == pytest.approx(predicted.stall_seconds, abs=1e-6)
    assert predicted.timeline.busy("device") / steps == near(predicted.busy_seconds["device"])


SMALL_GROUPS = {"subgroup": PARAMS // 160}
BYTES = [
    ("published_on_device", {}, 0.0, 0.0),
    ("on_device", {}, 0.0, 0.0),
    ("published_zero_offload", {}, 1.0, 1.0),
    ("deepspeed_zero_offload", {}, 2.0, 1.0),
    ("zero_offload", {"min_split_elements": 0}, 1.0, 1.0),
    ("published_delayed", {}, 1.0, 1.0),
    ("delayed", {"min_split_elements": 0}, 1.0, 1.0),
    ("zenflow", {"min_split_elements": 0}, 0.9, 0.9 / 4),
    ("zenflow", {"min_split_elements": 0, "topk_ratio": 0.5, "update_interval": 2}, 0.5, 0.25),
    ("zenflow_paper", {"min_split_elements": 0}, 0.9, 0.9 / 4),
    ("deepspeed_zenflow", {"update_interval": 1}, 3.0, 1.0),
    ("deepspeed_zenflow", {"update_interval": 4}, 1.5, 1.0),
    ("deepspeed_zenflow", {"update_interval": 8, "overlap": False}, 1.25, 1.0),
    ("published_zero_infinity", {}, 1.0, 1.0),
    ("deep_optimizer_states", {**SMALL_GROUPS, "stride": 1}, 6.0, 6.0),
    ("deep_optimizer_states", {**SMALL_GROUPS, "stride": 4}, 0.75 + 1.5, 0.75 + 1.5),
    ("deep_optimizer_states", {**SMALL_GROUPS, "stride": 161}, 1.0, 1.0),
    ("layer_overlapped", {}, 1.0, 1.0),
    ("superoffload", {}, 1.8, 1.8),
    ("superoffload", {"ratio": 0.5, "clipping": True}, 1.0, 1.0),
    ("torchao_offload", {}, 1.0, 1.0),
    ("adamw_8bit", {}, 0.0, 0.0),
    ("lora", {}, 0.0, 0.0),
]


@pytest.mark.parametrize(("name", "options", "down", "up"), BYTES)
def test_bytes_of_a_step_in_models_of_16_bits(name, options, down, up):
    predicted = predict(costs(), name, **options)
    assert predicted.d2h_bytes == pytest.approx(down * MODEL, rel=2e-3)
    assert predicted.h2d_bytes == pytest.approx(up * MODEL, rel=2e-3)


@pytest.mark.parametrize("interval", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("overlap", [True, False])
def test_released_zenflow_moves_two_models_and_two_more_in_a_window(interval, overlap):
    predicted = predict(costs(), "deepspeed_zenflow", update_interval=interval, overlap=overlap)
    assert predicted.d2h_bytes + predicted.h2d_bytes == near((2 + 2 / interval) * MODEL)


@pytest.mark.parametrize(
    ("name", "options", "down", "up"), [row for row in BYTES if row[0] in SYSTEMS]
)
def test_devices_that_share_the_state_share_its_copies(name, options, down, up):
    # Not the engine's: each of its ranks holds the whole state.
    predicted = predict(costs(devices=4), name, **options)
    assert predicted.d2h_bytes == pytest.approx(down * MODEL / 4, rel=1e-6)
    assert predicted.h2d_bytes == pytest.approx(up * MODEL / 4, rel=1e-6)


def test_only_deepspeed_copies_at_every_micro_batch():
    for name, options, down, up in BYTES:
        if name == "deepspeed_zero_offload":
            continue
        times = 3 if name == "deepspeed_zenflow" else 1
        predicted = predict(costs(accumulation=3), name, **options)
        assert predicted.d2h_bytes == pytest.approx(times * down * MODEL, rel=2e-3), name
        assert predicted.h2d_bytes == pytest.approx(times * up * MODEL, rel=2e-3), name


@pytest.mark.parametrize("overlap_comm", [False, True])
@pytest.mark.parametrize(
    ("accumulation", "down", "up"),
    [
        (1, 4, 2),  # float32 gradients; weights
        (2, 2 + 2 + 4, 2 + 2),  # the sum twice and floats; the sum once and weights
        (3, 2 + 2 + 2 + 4, 2 + 2 + 2),
    ],
)
def test_released_zero_offload_adds_micro_batches_up_by_way_of_the_device(
    accumulation, down, up, overlap_comm
):
    """Bytes of an element in `async_accumulate_grad_in_cpu_via_gpu` and the step's own."""
    found = costs(accumulation=accumulation)
    predicted = predict(found, "deepspeed_zero_offload", overlap_comm=overlap_comm)
    assert predicted.d2h_bytes == near(down * PARAMS)
    assert predicted.h2d_bytes == near(up * PARAMS)


def test_drives_move_master_and_moments_each_way():
    predicted = predict(costs(devices=2), "published_zero_infinity", tile=PARAMS // 7)
    timeline = predicted.timeline
    steps = len({span.step for span in timeline.spans if span.lane == "device"})
    assert timeline.num_bytes("nvme read") / steps == near(12 * PARAMS / 2)
    assert timeline.num_bytes("nvme write") / steps == near(12 * PARAMS / 2)


def test_two_devices_reduce_gradients_and_gather_weights():
    # A ring passes half of the model's bytes through each of two: 4 of 8 s, 0.4 s of a layer.
    shared = {"devices": 2, "gather": 8.0}
    assert step(costs(**shared, on_device=6.0), "published_on_device") == near(
        10 + 20 + 0.4 + 6 / 2 + 4
    )
    # Each has a link and a host of its own for its half.
    assert step(costs(**shared), "published_zero_offload") == near(
        10 + 20 + 0.4 + 0.5 + 15 + 5 + 4
    )
    # Over PCIe a model's half goes up and down each device's own link: 5 of 10 s, 0.5 of a layer.
    pcie = costs(devices=2, fabric="PCIe", on_device=6.0)
    assert step(pcie, "published_on_device") == near(10 + 20 + 0.5 + 6 / 2 + 5)
    # The first layer: 0.4 s reduced, 0.5 s down, 0.1 s updated, 0.5 s up, 0.4 s gathered. The
    # second one's all-gather is over by then.
    found = costs(**shared, update=2.0)
    assert step(found, "layer_overlapped") == near(10 + 20 + 0.4 + 0.5 + 0.1 + 0.5 + 0.4)


def test_passes_are_those_of_all_micro_batches():
    found = predict(costs(accumulation=2), "on_device")
    assert found.passes == {"forward": near(2 * 10.0), "backward": near(2 * 20.0)}


@pytest.mark.parametrize("rate", [None, 1e6])
def test_important_columns_and_whole_parameters_are_updated_at_rates_of_their_own(rate):
    """Half of all columns are important. Without a rate of theirs it is that of whole ones."""
    found = costs(on_device=4.0)
    own = None if rate is None else Quantity(value=rate)
    overheads = replace(found.hardware.overheads, column_update=own)
    found = replace(found, hardware=replace(found.hardware, overheads=overheads))
    important = predict(found, "zenflow", topk_ratio=0.5, min_split_elements=0)
    assert important.update_seconds == near(2.0 if rate is None else PARAMS / 2 / rate)
    assert predict(found, "on_device").update_seconds == near(4.0)


@pytest.mark.parametrize(
    ("name", "options", "stalls"),
    [
        ("published_zero_offload", {}, {"d2h": 1, "host": 30, "h2d": 10}),
        ("superoffload", {"ratio": 1.0}, {"host": 14, "h2d": 2}),
        ("layer_overlapped", {}, {"host": 13, "h2d": 1}),
        (
            "published_zero_infinity",
            {"tile": PARAMS // 4},
            {"d2h": 1, "nvme": 2, "host": 30, "h2d": 2.5},
        ),
        (
            "deep_optimizer_states",
            {"subgroup": PARAMS // 4, "stride": 5},
            {"d2h": 1, "host": 30, "h2d": 2.5},
        ),
    ],
)
def test_stalls_are_called_by_what_is_waited_for(name, options, stalls):
    # Reading 8 s in all, 2 s a tile, is behind the host's 7.5 s but for the first.
    predicted = predict(costs(read=8.0), name, **options)
    found = predicted.timeline.stalls()
    steps = len({span.step for span in predicted.timeline.spans if span.lane == "device"})
    assert {cause: seconds / steps for cause, seconds in found.items()} == pytest.approx(
        stalls, abs=1e-6
    )


# ---- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("deepspeed_zenflow", {"topk_ratio": 1.5}, "topk_ratio must be in"),
        ("deepspeed_zenflow", {"update_interval": 0}, "update_interval must be an integer >= 1"),
        ("deepspeed_zenflow", {"update_interval": "auto"}, "'auto' is not modelled"),
        ("deepspeed_zenflow", {"reserved_cores": 1.0}, "both processes need some"),
        ("published_zero_infinity", {"tile": 0}, "tile must be at least 1"),
        ("published_zero_infinity", {"buffer_count": 0}, "buffer_count must be at least 1"),
        ("deep_optimizer_states", {"subgroup": 0}, "subgroup must be at least 1"),
        ("deep_optimizer_states", {"stride": 0}, "stride must be at least 1"),
        ("superoffload", {"ratio": 1.1}, "ratio must be in"),
        ("layer_overlapped", {"clipping": True}, "layer_overlapped does not take"),
    ],
)
def test_an_option_out_of_its_range_is_refused(name, options, words):
    with pytest.raises(ConfigError, match=words):
        predict(costs(), name, **options)


def test_a_machine_without_drives_is_told_what_to_do():
    found = costs()
    bare = replace(found, hardware=replace(found.hardware, nvme=None))
    with pytest.raises(ConfigError, match=r"phases has none: add nvme to the profile"):
        predict(bare, "published_zero_infinity")


def test_backward_waits_where_the_ring_holds_no_more():
    work = Workload.of_config(*find_model("llama-2-7b"), batch_size=4)
    slow = find_machine("dgx-a100-80", 1).with_values({"link.d2h": 4e9, "link.duplex": 1.0})
    # Few columns' worth of host work, so that only the link is late.
    slow = slow.with_values({"host.dram": 1e13, "host.core_bandwidth": 1e12})
    done = simulate(costs_of(work, slow), Strategy.of("zenflow"))
    ring = 256 << 20
    for step in {span.step for span in done.timeline.spans}:
        own = [span for span in done.timeline.spans if span.step == step]
        began = min(s.start for s in own if s.name == "backward")
        (stepped,) = (s for s in own if s.lane == "device" and s.name == "step")
        left = (stepped.start - began) * 4e9
        assert done.d2h_bytes - left <= ring
        waits = [s for s in own if s.name == "stall:d2h"]
        assert waits
        assert all(began <= s.start < stepped.start + 1e-9 for s in waits)
    waited = done.stall_seconds / done.step_seconds
    assert waited > 0.5


def test_the_ring_keeps_what_an_upload_still_reads():
    work = Workload.of_config(*find_model("llama-2-7b"), batch_size=4)
    slow = find_machine("dgx-a100-80", 1).with_values({"link.h2d": 4e9, "link.duplex": 1.0})
    slow = slow.with_values({"host.dram": 1e13, "host.core_bandwidth": 1e12})
    found = costs_of(work, slow)
    done = simulate(found, Strategy.of("delayed"))
    most = 2 * max(segment.numel for segment in found.segments)
    for step in {span.step for span in done.timeline.spans}:
        own = [span for span in done.timeline.spans if span.step == step]
        began = min(s.start for s in own if s.name == "backward")
        (stepped,) = (s for s in own if s.lane == "device" and s.name == "step")
        assert done.h2d_bytes - (stepped.start - began) * 4e9 <= most
        assert any(s.name == "stall:d2h" for s in own), "backward waits for room"


def test_only_the_kernel_of_deepspeeds_step_gains_from_a_second_socket():
    def update(machine, devices):
        hardware = replace(find_machine(machine, devices), host_threads=64)
        made = Machine(hardware)
        kernel = least_seconds(made.host_kind, RELEASED.update * 1e9 / devices)
        return kernel, host_seconds(made, 1e9 / devices)

    (one, whole), (two, faster) = update("a100-epyc-7742", 2), update("dgx-a100-40", 2)
    host = find_machine("a100-epyc-7742").host
    bytes_each = RELEASED.prepare + RELEASED.update + RELEASED.convert
    assert whole == pytest.approx(1e9 * bytes_each / step_rate(host))
    assert two == pytest.approx(one / 2)
    assert faster == pytest.approx(whole - one / 2)


@pytest.mark.parametrize("tokens", [128, 2048])
@pytest.mark.parametrize(
    ("offloaded", "whole"),
    [
        ("superoffload", "deepspeed_zero3"),
        ("zero3_offload", "deepspeed_zero3"),
        ("deepspeed_zero_offload", "deepspeed_zero2"),
        ("fsdp2_offload", "fsdp2"),
    ],
)
def test_no_system_is_faster_with_offload_than_without(offloaded, whole, tokens):
    name, config = find_model("llama-3.2-1b")
    workload = Workload.of_config(name, config, batch_size=1, sequence=tokens)
    found = costs_of(workload, find_machine("gh200-quad"))
    assert step(found, offloaded) > step(found, whole)
