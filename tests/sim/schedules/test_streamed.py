"""Streamed weights: closed forms of the schedule's limits, and what is refused."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from sim.hardware.catalog import find_machine
from sim.machine import Machine
from sim.models.table import find_model
from sim.models.workload import Workload
from sim.schedules.streams import Streams, layers_of
from sim.simulate import Strategy, simulate
from sim.steady import steady
from sim.timing.costs import costs_of
from sim.timing.phases import costs_of_phases
from zenflow.errors import ConfigError

LAYERS, PARAMS, WINDOW = 12, 12 * 10**8, 4


def costs(link, compute=3.6):
    """Return costs of a model whose weights take so many seconds over the link, each way."""
    return costs_of_phases(
        forward=compute / 3, backward=2 * compute / 3, d2h=link, update=0.01, h2d=link,
        num_params=PARAMS, num_layers=LAYERS,
    )  # fmt: skip


def predict(link, compute=3.6, changes=None, **streams):
    rule = {"topk_ratio": 0, "update_interval": WINDOW, "select_interval": 1000}
    strategy = Strategy.of("zenflow", **{**rule, **(changes or {})}, streams=Streams(**streams))
    return simulate(costs(link, compute), strategy)


def test_where_all_layers_stay_nothing_changes():
    usual = simulate(costs(1.0), Strategy.of("zenflow", topk_ratio=0, update_interval=WINDOW))
    found = predict(1.0, resident_layers=LAYERS)
    assert found.step_seconds == pytest.approx(usual.step_seconds, rel=1e-9)
    assert found.stall_seconds == pytest.approx(usual.stall_seconds, rel=1e-9)


@pytest.mark.parametrize("slots", [2, 3, 5])
@pytest.mark.parametrize("resident", [0, 3, 6])
def test_bytes_of_a_step(slots, resident):
    visiting = LAYERS - resident
    found = predict(0.1, slots=slots, resident_layers=resident)
    size = 2 * PARAMS / LAYERS
    # Those that are there at the turns don't come again.
    assert found.h2d_bytes == pytest.approx(
        2 * max(0, visiting - slots) * size + LAYERS * size / WINDOW, rel=1e-6
    )
    assert found.d2h_bytes == pytest.approx((visiting + LAYERS) * size, rel=1e-6)


def test_important_columns_stay_on_the_device():
    """Their gradients never leave and no update of theirs comes; pages come and go whole."""
    found = predict(0.1, changes={"topk_ratio": 0.25}, slots=3)
    size, deferred = 2 * PARAMS / LAYERS, 0.75
    coming = 2 * (LAYERS - 3) + deferred * LAYERS / WINDOW
    assert found.h2d_bytes == pytest.approx(coming * size, rel=1e-3)
    assert found.d2h_bytes == pytest.approx((1 + deferred) * LAYERS * size, rel=1e-3)


def test_updates_that_land_in_their_step_let_all_layers_visit_once_more():
    """Backward moves nothing, so that weights go home behind the landing alone."""
    found = predict(0.1, changes={"update_interval": 1, "overlap_step": False}, slots=3)
    size = 2 * PARAMS / LAYERS
    # The first layer has been at work last, and is still there.
    visits = 2 * (LAYERS - 3) + (LAYERS - 1)
    coming = visits + LAYERS
    assert found.h2d_bytes == pytest.approx(coming * size, rel=1e-6)
    assert found.d2h_bytes == pytest.approx(2 * LAYERS * size, rel=1e-6)


def test_under_the_published_rule_weights_go_home_where_updates_land():
    found = predict(0.1, changes={"update_rule": "published"}, slots=3)
    size = 2 * PARAMS / LAYERS
    assert found.d2h_bytes == pytest.approx((1 + 1 / WINDOW) * LAYERS * size, rel=1e-6)


def test_the_first_forward_writes_important_columns_behind_the_way_home():
    """The first layer is still there, on its way home."""
    plain, important = (
        predict(1.0, changes={"topk_ratio": ratio}, slots=LAYERS) for ratio in (0.0, 0.01)
    )
    assert important.stall_seconds > plain.stall_seconds + 1.0 / LAYERS


def test_warm_up_is_over_when_steps_are_measured():
    changed = predict(1.0, changes={"full_warm_up_rounds": 3})
    assert changed.step_seconds == pytest.approx(predict(1.0).step_seconds, rel=1e-6)


def selection(**streams):
    """Return the bytes by lane and the seconds that one selection adds to a run."""
    its_costs, totals = costs(0.1), []
    for every in (0, 10):
        strategy = Strategy.of(
            "zenflow", topk_ratio=0.25, update_interval=WINDOW, select_strategy="step",
            select_interval=every, streams=Streams(**streams),
        )  # fmt: skip
        machine = Machine(its_costs.hardware)
        schedule = strategy.schedule(machine, its_costs)
        machine.run(schedule.run(17))  # selects behind the first step, and once more
        lanes = ("weights h2d", "weights d2h")
        moved = [machine.recording.since(0, lane)[1] for lane in lanes]
        totals.append([*moved, schedule.step_ends[-1]])
    return [more - less for less, more in zip(*totals, strict=True)]


def test_a_selection_lets_weights_come_and_go_once_more():
    up, down, seconds = selection(slots=3)
    # A layer's three blocks end their windows in three steps.
    visits = 3 * 2 * PARAMS
    assert down == pytest.approx(visits, rel=1e-6)
    # They take the places of the first layers, which the next forward asks for.
    assert up == pytest.approx(visits, rel=0.1)
    assert seconds > 0


def test_a_fast_link_hides_all_of_it():
    found = predict(1e-3, slots=3)
    assert found.step_seconds == pytest.approx(3.6, rel=1e-3)


def test_without_compute_a_step_takes_what_the_busiest_direction_takes():
    """Weights that go home and gradients share one direction, in backward and behind it."""
    link = 6.0
    found = predict(link, compute=1e-6, slots=3)
    least = 2 * link  # weights and gradients, down
    assert least <= found.step_seconds
    coming = 2 * (LAYERS - 3) / LAYERS * link + link / WINDOW
    assert found.step_seconds <= least + coming
    assert found.timeline.busy("weights d2h") > 0


def test_more_resident_layers_are_never_slower():
    steps = [predict(3.0, resident_layers=count).step_seconds for count in range(0, 13, 3)]
    assert steps == sorted(steps, reverse=True)


def test_stalls_have_a_cause_of_their_own():
    names = {span.name for span in predict(6.0, slots=2).timeline.spans if span.is_stall}
    assert "stall:weights" in names


def test_the_quick_way_takes_the_simulator():
    strategy = Strategy.of("zenflow", topk_ratio=0, streams=Streams(slots=2))
    quick, slow = steady(costs(3.0), strategy), simulate(costs(3.0), strategy)
    assert quick.step_seconds == slow.step_seconds


def test_a_large_model_on_a_small_card_is_hidden_from_some_thousand_tokens_on():
    """On PCIe 4 a micro-batch of 8K tokens hides the visits, and one of 1K does not."""
    machine = find_machine("rtx4090-desktop", 1)
    shares = []
    for batch in (1, 8):
        workload = Workload.of_config(
            *find_model("qwen3-14b"), batch_size=batch, sequence=1024, checkpointing=True
        )
        its_costs = costs_of(workload, machine)
        assert len(layers_of(its_costs.segments)) == 40
        strategy = Strategy.of("zenflow", topk_ratio=0, queue_depth=4, streams=Streams())
        found = simulate(its_costs, strategy)
        shares.append(its_costs.compute_seconds / found.step_seconds)
    assert shares[0] < 0.5
    assert shares[1] > 0.85


@pytest.mark.parametrize(
    ("changes", "streams", "message"),
    [
        ({"topk_ratio": 1}, {}, "topk_ratio below 1"),
        ({"releases": False}, {}, "release mode"),
        ({}, {"resident_layers": 13}, "at most 12"),
    ],
)
def test_what_the_engine_refuses_is_refused(changes, streams, message):
    strategy = Strategy.of("zenflow", **{"topk_ratio": 0, **changes}, streams=Streams(**streams))
    with pytest.raises(ConfigError, match=re.escape(message)):
        simulate(costs(1.0), strategy)


@pytest.mark.parametrize("streams", [{"slots": 1}, {"slots": 0}, {"resident_layers": -1}])
def test_numbers_have_rules(streams):
    with pytest.raises(ConfigError, match=r"at least|or more"):
        Streams(**streams)


def test_other_systems_and_several_devices_have_no_streams():
    with pytest.raises(ConfigError, match="its own way, or none"):
        Strategy.of("slideformer", streams=Streams())
    workload = Workload.of_config(*find_model("gpt2"), batch_size=8)
    its_costs = costs_of(workload, find_machine("hgx-h100", 8))
    with pytest.raises(ConfigError, match="one device"):
        simulate(its_costs, Strategy.of("zenflow", topk_ratio=0, streams=Streams()))


# ---- what happens when, to be read ------------------------------------------------------------

GOLDEN = Path(__file__).parent / "streamed.txt"
"""Steps of four layers with three slots and with two, and with two micro-batches.

A layer takes 1 s of forward and 2 s of backward, and its weights or gradients 1 s each way.
"""


def log(slots, accumulation):
    """Return what begins in a settled step, a line each."""
    found = costs_of_phases(
        forward=4.0, backward=8.0, d2h=4.0, update=1e-3, h2d=4.0, num_params=4 * 10**6,
        num_layers=4,
    )  # fmt: skip
    machine = Machine(found.hardware)
    strategy = Strategy.of(
        "zenflow", topk_ratio=0, update_interval=4, streams=Streams(slots=slots)
    )
    schedule = strategy.schedule(machine, replace(found, accumulation=accumulation))
    machine.run(schedule.run(10))
    start, end = schedule.step_ends[7:9]
    lanes = ("device", "weights h2d", "weights d2h", "d2h", "h2d")
    rows = sorted(
        (
            (round(span.start - start, 2) + 0.0, lanes.index(span.lane), span)
            for span in machine.recording.timeline({}).spans
            if span.seconds > 1e-3 and span.lane in lanes and start <= span.start + 1e-9 < end
        ),
        key=lambda row: row[:2],
    )
    lines = [
        f"{begin:5.2f}-{span.end - start:5.2f} {span.lane} {span.name}" for begin, _, span in rows
    ]
    return "\n".join([f"{slots} slots, {accumulation} micro-batches", *lines])


def test_a_settled_step():
    logs = "\n\n".join(log(*case) for case in ((3, 1), (2, 1), (3, 2))) + "\n"
    assert logs == GOLDEN.read_text()


def test_inputs_of_layers_take_the_lanes_of_the_weights():
    """Behind updates that are not computed yet they would be late, and the device would wait."""
    hardware = find_machine("rtx4090-desktop", 1).with_values({"host.dram_bytes": 2.0**39})
    given = {"batch_size": 16, "sequence": 1024, "checkpointing": True, "loss": "chunks"}
    strategy = Strategy.of("zenflow", topk_ratio=0, queue_depth=4, streams=Streams())
    found = {}
    for offloads in (False, True):
        name, config = find_model("qwen3-14b")
        work = Workload.of_config(name, config, **given, offloads_activations=offloads)
        found[offloads] = simulate(costs_of(work, hardware), strategy)
    layers, width = config["num_hidden_layers"], config["hidden_size"]
    moved = (layers - 2) * 16 * 1024 * width * 2  # all but the first layer's and the last's
    before, after = found[False], found[True]
    assert after.d2h_bytes - before.d2h_bytes == pytest.approx(moved)
    assert after.h2d_bytes - before.h2d_bytes == pytest.approx(moved)
    assert after.step_seconds == pytest.approx(before.step_seconds, rel=1e-3)
