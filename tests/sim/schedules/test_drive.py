"""States on a drive: closed forms of the schedule's limits, and what is refused."""

from dataclasses import replace
from itertools import pairwise

import pytest

from sim.hardware.components import Fabric, Nvme
from sim.hardware.quantity import Quantity
from sim.schedules import drive
from sim.schedules.streams import Streams
from sim.simulate import Strategy, simulate
from sim.starved import Starved
from sim.steady import steady
from sim.timing.phases import costs_of_phases
from zenflow.errors import ConfigError
from zenflow.rule.sizes import NUM_BUFFERS

LAYERS, PARAMS, WINDOW = 12, 12 * 10**8, 4
STATES = 12 * PARAMS


def drives(read, write, duplex=None):
    """Return drives whose states take so many seconds each way."""
    return Nvme(
        name="drives",
        read=Quantity(value=STATES / read),
        write=Quantity(value=STATES / write),
        capacity=Quantity(value=1e13),
        duplex=None if duplex is None else Quantity(value=duplex),
    )


def costs(nvme, compute=1.0, update=0.01):
    found = costs_of_phases(
        forward=compute / 3, backward=2 * compute / 3, d2h=0.01, update=update, h2d=0.01,
        num_params=PARAMS, num_layers=LAYERS,
    )  # fmt: skip
    return replace(found, hardware=replace(found.hardware, nvme=nvme))


def strategy(**changes):
    rule = {"topk_ratio": 0, "update_interval": WINDOW, "queue_depth": WINDOW, **changes}
    return Strategy.of("zenflow", **{"state_on_drive": True, **rule})


def predict(nvme, compute=1.0, **changes):
    return simulate(costs(nvme, compute), strategy(**changes))


@pytest.mark.parametrize(("interval", "depth"), [(4, 4), (4, 3), (4, 2), (4, 1), (6, 4), (1, 1)])
@pytest.mark.parametrize("host_state", ["float32", "compact"])
def test_each_way_moves_all_states_as_often_as_queues_are_full(interval, depth, host_state):
    config = {"update_interval": interval, "queue_depth": depth, "host_state": host_state}
    found = predict(drives(0.1, 0.1), **config)
    passes = -(-interval // depth) / interval
    each = (12 if host_state == "float32" else 5 + 2 / 64) * PARAMS * passes
    # Extents end with whole sectors.
    assert found.drive_read_bytes == pytest.approx(each, rel=2e-3)
    assert found.drive_written_bytes == pytest.approx(found.drive_read_bytes, rel=1e-9)


@pytest.mark.parametrize(("read", "write", "duplex", "bound"), [
    (16.0, 4.0, None, 4.0), (4.0, 16.0, None, 4.0), (16.0, 16.0, 0.5, 8.0),
])  # fmt: skip
def test_a_step_that_a_drive_bounds_takes_bytes_over_bandwidth(read, write, duplex, bound):
    """Half of both bandwidths together is as if each way were half as fast."""
    found = predict(drives(read, write, duplex))
    assert found.step_seconds == pytest.approx(bound, rel=5e-3)
    stalls = {span.name for span in found.timeline.spans if span.name.startswith("stall")}
    assert "stall:drive" in stalls
    assert found.stall_seconds == pytest.approx(bound - 1.0, rel=0.05)
    assert found.timeline.busy(drive.LANE) > 0


def test_half_of_the_passes_take_half_of_the_time():
    one, two = (predict(drives(16.0, 1.0), queue_depth=depth) for depth in (4, 2))
    assert two.step_seconds == pytest.approx(2 * one.step_seconds, rel=5e-3)


def test_a_drive_that_is_fast_enough_is_hidden():
    nvme = drives(2.0, 2.0)
    usual = simulate(costs(nvme), strategy(state_on_drive=False))
    assert predict(nvme).step_seconds == pytest.approx(usual.step_seconds, rel=1e-2)


def test_a_slow_host_is_no_stall_of_the_drive():
    nvme = drives(0.01, 0.01)
    found = simulate(costs(nvme, update=12.0), strategy())
    names = [span.name for span in found.timeline.spans if span.name.startswith("stall")]
    assert "stall:host" in names
    of_drive = sum(s.seconds for s in found.timeline.spans if s.name == "stall:drive")
    assert of_drive < 0.05 * sum(s.seconds for s in found.timeline.spans if "stall" in s.name)


def test_no_more_extents_are_in_memory_than_there_are_buffers():
    found = predict(drives(1.0, 8.0))
    spans = [span for span in found.timeline.spans if span.lane == drive.LANE]
    reads = sorted(span.end for span in spans if span.name == "read")
    writes = sorted(span.end for span in spans if span.name == "write")
    most = max(
        sum(end <= moment for end in reads) - sum(end <= moment for end in writes)
        for moment in reads
    )
    # What was there when the timeline began is written besides.
    assert 0 < most <= NUM_BUFFERS


def test_an_extent_is_not_read_before_it_is_written():
    its = costs(drives(0.5, 4.0), compute=0.1)
    its = replace(its, segments=its.segments[:1])
    spans = simulate(its, strategy(update_interval=1, queue_depth=1)).timeline.spans
    own = [span for span in spans if span.lane == drive.LANE]
    steps = sorted({span.step for span in own})
    for step, following in pairwise(steps[:-1]):
        written = max(s.end for s in own if s.step == step and s.name == "write")
        read = min(s.start for s in own if s.step == following and s.name == "read")
        assert read >= written - 1e-9


def test_joined_extents_change_little(monkeypatch):
    whole = predict(drives(4.2, 4.2), compute=1.0).step_seconds
    monkeypatch.setattr(drive, "MOST_EXTENTS", 150)
    assert predict(drives(4.2, 4.2), compute=1.0).step_seconds == pytest.approx(whole, rel=0.02)


def test_streamed_weights_may_have_their_states_on_a_drive():
    nvme = drives(8.0, 8.0)
    found = simulate(costs(nvme), strategy(streams=Streams(slots=3)))
    assert found.step_seconds == pytest.approx(2.0, rel=2e-2)


def test_steady_states_are_those_of_the_simulation():
    its_costs, its = costs(drives(8.0, 8.0)), strategy()
    simulated = simulate(its_costs, its).step_seconds
    assert steady(its_costs, its).step_seconds == pytest.approx(simulated, rel=1e-9)


def test_starved_times_are_told_for_any_span():
    starved = Starved()
    for now, is_running in ((1.0, True), (2.0, False), (2.5, False), (4.0, True)):
        starved.run(now, is_running=is_running)
    assert starved.seconds(0.0, 5.0) == 2.0
    assert starved.seconds(1.5, 4.5) == 1.0
    assert starved.seconds(2.0, 4.0) == 0.0


@pytest.mark.parametrize(("changes", "words"), [
    ({"topk_ratio": 0.1}, "topk_ratio=0.1"), ({"update_rule": "published"}, "published"),
])  # fmt: skip
def test_settings_that_the_engine_refuses_are_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        strategy(**changes)


def test_zero_infinity_is_zero_offload_whose_weights_visit_and_states_pass():
    own = Strategy.of("zero_infinity")
    other = Strategy.of("zero_offload", streams=Streams(), state_on_drive=True)
    assert own == replace(other, name="zero_infinity")
    found = costs(drives(1.0, 1.0))
    spans, others = (simulate(found, strategy).timeline.spans for strategy in (own, other))
    assert spans == others
    assert Strategy.of("zero_infinity", streams=Streams(resident_layers=1)).streams != own.streams


def test_a_machine_without_drives_and_several_devices_are_refused():
    with pytest.raises(ConfigError, match="no drive"):
        predict(None)
    several = costs(drives(1.0, 1.0))
    ring = Fabric(name="ring", bandwidth=Quantity(value=1e11), latency=Quantity(value=1e-6))
    several = replace(several, hardware=replace(several.hardware, num_devices=2, fabric=ring))
    with pytest.raises(ConfigError, match="one process"):
        simulate(several, strategy())
    with pytest.raises(ConfigError, match="one device"):
        simulate(several, Strategy.of("zero_infinity"))
    with pytest.raises(ConfigError, match="own place for states"):
        Strategy.of("published_zero_infinity", state_on_drive=True)
