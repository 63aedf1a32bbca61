"""Fluid resources share as water does: fairly, completely, never more than there is."""

import math

import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.fluid import FlowKind, FluidNetwork, Resource, fair_rates
from sim.lanes import HostLane, Recording, SerialLane, Work
from zenflow.errors import ConfigError


def send(network, kind, num_bytes):
    """Begin a flow; return it, and the event of its end."""
    done = network.env.event()
    return network.send(kind, num_bytes, done.succeed), done


def run(starts):
    """Return the network after flows of (start, bytes, kind), and when each of them ended."""
    env = simpy.Environment()
    network = FluidNetwork(env)
    ends = [math.nan] * len(starts)

    def flow(index, start, num_bytes, kind):
        yield env.timeout(start)
        yield send(network, kind, num_bytes)[1]
        ends[index] = env.now

    for index, start in enumerate(starts):
        env.process(flow(index, *start))
    env.run()
    assert network.flows == []
    return network, ends


def end_times(starts):
    return run(starts)[1]


def test_one_flow_takes_its_bytes_over_the_narrowest_bandwidth():
    link, dram = Resource("d2h", 25e9), Resource("dram", 200e9)
    assert end_times([(1.0, 50e9, FlowKind("copy", {link: 1, dram: 1}))]) == [3.0]
    assert end_times([(0.0, 50e9, FlowKind("copy", {link: 1, dram: 16}))]) == [4.0]
    assert end_times([(0.0, 50e9, FlowKind("copy", {link: 1, dram: 1}, 10e9))]) == [5.0]


def test_two_flows_share_and_the_second_has_all_once_it_is_alone():
    # At 1 s the first has 2 bytes left, and half the link; at 5 s the second has 2, and all of it.
    link = Resource("link", 1.0)
    kind = FlowKind("copy", {link: 1})
    network, ends = run([(0.0, 3.0, kind), (1.0, 4.0, kind)])
    assert ends == pytest.approx([5.0, 7.0])
    assert network.carried(link) == pytest.approx(7.0)  # in 7 s at 1 byte/s: never idle


def test_flows_share_in_proportion_to_their_weights():
    # 3 of 4 bytes/s for the heavy one: both end at 2 s.
    link = Resource("link", 4.0)
    heavy, light = FlowKind("a", {link: 1}, weight=3.0), FlowKind("b", {link: 1}, weight=1.0)
    assert end_times([(0.0, 6.0, heavy), (0.0, 2.0, light)]) == pytest.approx([2.0, 2.0])


def test_a_copy_and_cpu_adam_meet_in_dram():
    # DRAM 10: Adam asks for all of it, the copy gets its fair 4 at the link's limit first.
    link, dram = Resource("d2h", 4.0), Resource("dram", 10.0)
    copy = (0.0, 8.0, FlowKind("copy", {link: 1, dram: 1}))
    adam = (0.0, 32.0, FlowKind("adam", {dram: 1}))
    assert end_times([copy, adam]) == pytest.approx([2.0, 4.0])  # 2 s at 6, 2 s at 10


def test_both_directions_of_a_link_together_are_slower_than_alone():
    up, down, both = Resource("up", 10.0), Resource("down", 10.0), Resource("duplex", 15.0)
    ways = [FlowKind(way.name, {way: 1, both: 1}) for way in (up, down)]
    assert end_times([(0.0, 30.0, ways[0])]) == [3.0]
    assert end_times([(0.0, 30.0, way) for way in ways]) == pytest.approx([4.0, 4.0])


@pytest.mark.parametrize("num_bytes", [1e-3, 1.0, 1e12, 1e18])
def test_flows_of_any_size_end(num_bytes):
    link = Resource("link", 64e9)
    starts = [
        (0.1 * index, num_bytes * (1 + index / 3), FlowKind("copy", {link: 1 + index / 7}))
        for index in range(5)
    ]
    assert all(math.isfinite(end) for end in end_times(starts))


def test_nothing_to_move_ends_at_once():
    assert end_times([(2.0, 0.0, FlowKind("copy", {Resource("link", 1.0): 1}))]) == [2.0]


def test_a_stopped_flow_keeps_what_it_had_left_and_leaves_the_rest_to_others():
    # Two of 6 bytes at 1 byte/s each; the first is stopped at 2 s, the second then has both.
    env = simpy.Environment()
    network, link = FluidNetwork(env), Resource("link", 2.0)
    (first, end), (_, second_end) = (send(network, FlowKind(n, {link: 1}), 6.0) for n in "ab")
    env.run(until=2.0)
    assert network.stop(first) == pytest.approx(4.0)
    env.run(until=second_end)
    assert env.now == pytest.approx(4.0)
    assert not end.triggered
    assert network.carried(link) == pytest.approx(8.0)
    env.run(until=send(network, first.kind, first.remaining)[1])
    assert env.now == pytest.approx(6.0)
    assert network.carried(link) == pytest.approx(12.0)


def test_a_flow_that_has_ended_has_nothing_left_to_stop():
    env = simpy.Environment()
    network = FluidNetwork(env)
    flow, _ = send(network, FlowKind("copy", {Resource("link", 1.0): 1}), 1.0)
    env.run()
    assert network.stop(flow) == 0.0


def test_jobs_of_which_the_last_end_alone_is_asked_for_follow_one_another():
    # 1 s of their own, then bytes at 1 byte/s; what comes next on the lane begins behind them.
    env = simpy.Environment()
    recording = Recording()
    lane = SerialLane("device", FluidNetwork(env), recording)
    kind = FlowKind("compute", {Resource("cores", 1.0): 1})
    works = [Work(seconds=1.0, kind=kind, num_bytes=size) for size in (0.0, 2.0, 4.0)]
    last = lane.submit_all("forward", 1, works)
    lane.submit("step", 1, Work(seconds=1.0))
    env.run(until=last)
    assert env.now == 9.0
    env.run()
    assert [row[2:4] for row in recording.rows] == [(0, 1), (1, 4), (4, 9), (9, 10)]


@pytest.mark.parametrize("is_first", [True, False])
def test_urgent_work_that_comes_as_a_task_ends_follows_it(is_first):
    env = simpy.Environment()
    recording = Recording()
    lane = HostLane("host", FluidNetwork(env), recording)
    kind = FlowKind("host", {Resource("dram", 1.0): 1})

    def submit(_):
        lane.submit("urgent", 2, Work(kind=kind, num_bytes=1.0), deadline=1)

    if is_first:  # SimPy takes events of one moment in the order in which they were made
        env.timeout(2.0).callbacks.append(submit)
    patient = lane.submit("patient", 1, Work(kind=kind, num_bytes=2.0), deadline=5)
    if not is_first:
        env.timeout(2.0).callbacks.append(submit)
    env.run(until=patient)
    assert env.now == 2.0
    env.run()
    assert [row[1:4] for row in recording.rows] == [("patient", 0.0, 2.0), ("urgent", 2.0, 3.0)]


@pytest.mark.parametrize("arrives", [0.5, 2.0, 3.75])
def test_a_more_urgent_task_comes_in_between_and_the_work_stays_the_same(arrives):
    env = simpy.Environment()
    recording = Recording()
    lane = HostLane("host", FluidNetwork(env), recording)
    kind = FlowKind("host", {Resource("dram", 1.0): 1})
    lane.submit("patient", 1, Work(kind=kind, num_bytes=4.0, counted=8.0), deadline=5)
    env.timeout(arrives).callbacks.append(
        lambda _: lane.submit("urgent", 2, Work(kind=kind, num_bytes=1.0), deadline=1)
    )
    env.run()
    names = [row[1] for row in recording.rows]
    times = [row[2:4] for row in recording.rows]
    assert names == ["patient", "urgent", "patient"]
    assert times == [(0.0, arrives), (arrives, arrives + 1), (arrives + 1, 5.0)]
    assert recording.totals["host", "patient", 1] == pytest.approx([4.0, 8.0])


CLOCK = 1e-12
"""Seconds that a difference of two times below 100 s may be off by."""


@st.composite
def crowds(draw):
    """Draw flows over a few resources, begun at any time."""
    number = draw(st.integers(1, 4))
    capacities = [draw(st.floats(0.5, 1e3)) for _ in range(number)]
    resources = [Resource(f"r{index}", capacity) for index, capacity in enumerate(capacities)]
    starts = []
    for index in range(draw(st.integers(1, 8))):
        used = draw(st.lists(st.sampled_from(resources), min_size=1, unique=True))
        uses = {resource: draw(st.floats(0.1, 5.0)) for resource in used}
        limit = draw(st.just(math.inf) | st.floats(0.1, 1e3))
        weight = draw(st.just(1.0) | st.floats(0.1, 10.0))
        kind = FlowKind(f"flow {index}", uses, limit, weight)
        starts.append((draw(st.floats(0, 10)), draw(st.floats(1e-6, 1e6)), kind))
    return resources, starts


@settings(max_examples=100, deadline=None)
@given(crowd=crowds())
def test_every_byte_is_moved_once_and_no_faster_than_anything_allows(crowd):
    resources, starts = crowd
    network, ends = run(starts)
    for resource in resources:
        moved = sum(size * kind.uses.get(resource, 0.0) for _, size, kind in starts)
        assert network.carried(resource) == pytest.approx(moved, rel=1e-6)
        users = [i for i, (*_, kind) in enumerate(starts) if resource in kind.uses]
        if users:
            seconds = max(ends[i] for i in users) - min(starts[i][0] for i in users)
            assert moved <= resource.capacity * (seconds * (1 + 1e-6) + CLOCK)
    for (start, size, kind), end in zip(starts, ends, strict=True):
        fastest = min([kind.max_rate, *(r.capacity / share for r, share in kind.uses.items())])
        assert end - start >= size / fastest * (1 - 1e-6) - CLOCK


@settings(max_examples=100, deadline=None)
@given(crowd=crowds())
def test_no_rate_could_be_raised_without_lowering_a_smaller_one(crowd):
    resources, starts = crowd
    kinds = [kind for *_, kind in starts]
    rates = fair_rates(kinds)
    flows = list(zip(kinds, rates, strict=True))
    used = {
        resource: sum(rate * kind.uses.get(resource, 0) for kind, rate in flows)
        for resource in resources
    }
    for resource in resources:
        assert used[resource] <= resource.capacity * (1 + 1e-9)
    for kind, rate in flows:
        if rate >= kind.max_rate * (1 - 1e-9):
            continue
        bottlenecks = [r for r in kind.uses if used[r] >= r.capacity * (1 - 1e-9)]
        assert any(
            all(
                other_rate / other.weight <= rate / kind.weight * (1 + 1e-9)
                for other, other_rate in flows
                if resource in other.uses
            )
            for resource in bottlenecks
        )


@settings(max_examples=60, deadline=None)
@given(crowd=crowds())
def test_the_same_flows_end_at_the_same_times(crowd):
    _, starts = crowd
    assert end_times(starts) == end_times(starts)


@settings(max_examples=60, deadline=None)
@given(crowd=crowds(), moment=st.floats(0.1, 5.0), chosen=st.integers(0, 7))
def test_stopping_a_flow_and_sending_what_it_had_left_loses_no_byte(crowd, moment, chosen):
    resources, starts = crowd
    env = simpy.Environment()
    network = FluidNetwork(env)
    flows = [send(network, kind, size)[0] for _, size, kind in starts]
    env.run(until=moment)
    flow = flows[chosen % len(flows)]
    left = network.stop(flow)
    assert 0 <= left < flow.num_bytes
    _, end = send(network, flow.kind, left)
    env.run()
    assert end.processed
    for resource in resources:
        moved = sum(size * kind.uses.get(resource, 0.0) for _, size, kind in starts)
        assert network.carried(resource) == pytest.approx(moved, rel=1e-6)


@pytest.mark.parametrize("capacity", [0.0, -1.0, math.inf, math.nan])
def test_a_bandwidth_with_which_nothing_ends_is_refused(capacity):
    with pytest.raises(ConfigError, match="capacity of link must be a positive number"):
        Resource("link", capacity)


@pytest.mark.parametrize("num_bytes", [-1.0, math.nan, math.inf])
def test_a_size_that_never_ends_is_refused(num_bytes):
    kind = FlowKind("copy", {Resource("link", 1.0): 1})
    with pytest.raises(ConfigError, match="bytes must be"):
        send(FluidNetwork(simpy.Environment()), kind, num_bytes)


@pytest.mark.parametrize(
    ("uses", "rate"),
    [({}, math.inf), ({Resource("link", 1.0): 0}, math.inf), ({Resource("link", 1.0): 1}, 0.0)],
)
def test_a_flow_that_nothing_bounds_or_lets_move_is_refused(uses, rate):
    with pytest.raises(ConfigError, match="needs a resource"):
        FlowKind("copy", uses, rate)
