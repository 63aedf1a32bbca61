"""Fluid resources share as water does: fairly, completely, never more than there is."""

import math

import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.fluid import Flow, FluidNetwork, Resource, fair_rates
from zenflow.errors import ConfigError


def end_times(starts):
    """Return when each flow of (start, bytes, uses, max rate) ends."""
    env = simpy.Environment()
    network = FluidNetwork(env)
    ends = [math.nan] * len(starts)

    def flow(index, start, num_bytes, uses, max_rate):
        yield env.timeout(start)
        yield network.send(num_bytes, uses, max_rate)
        ends[index] = env.now

    for index, start in enumerate(starts):
        env.process(flow(index, *start))
    env.run()
    assert network.flows == []
    return ends


def test_one_flow_takes_its_bytes_over_the_narrowest_bandwidth():
    link, dram = Resource("d2h", 25e9), Resource("dram", 200e9)
    assert end_times([(1.0, 50e9, {link: 1, dram: 1}, math.inf)]) == [3.0]
    assert end_times([(0.0, 50e9, {link: 1, dram: 16}, math.inf)]) == [4.0]
    assert end_times([(0.0, 50e9, {link: 1, dram: 1}, 10e9)]) == [5.0]


def test_two_flows_share_and_the_second_has_all_once_it_is_alone():
    # At 1 s the first has 2 bytes left, and half the link; at 5 s the second has 2, and all of it.
    link = Resource("link", 1.0)
    starts = [(0.0, 3.0, {link: 1}, math.inf), (1.0, 4.0, {link: 1}, math.inf)]
    assert end_times(starts) == pytest.approx([5.0, 7.0])
    assert link.carried == pytest.approx(7.0)
    assert link.busy_seconds == pytest.approx(7.0)


def test_a_copy_and_cpu_adam_meet_in_dram():
    # DRAM 10: Adam asks for all of it, the copy gets its fair 4 at the link's limit first.
    link, dram = Resource("d2h", 4.0), Resource("dram", 10.0)
    copy = (0.0, 8.0, {link: 1, dram: 1}, math.inf)
    adam = (0.0, 32.0, {dram: 1}, math.inf)
    assert end_times([copy, adam]) == pytest.approx([2.0, 4.0])  # 2 s at 6, 2 s at 10


def test_both_directions_of_a_link_together_are_slower_than_alone():
    up, down, both = Resource("up", 10.0), Resource("down", 10.0), Resource("duplex", 15.0)
    alone = end_times([(0.0, 30.0, {up: 1, both: 1}, math.inf)])
    assert alone == [3.0]
    starts = [(0.0, 30.0, {way: 1, both: 1}, math.inf) for way in (up, down)]
    assert end_times(starts) == pytest.approx([4.0, 4.0])


@pytest.mark.parametrize("num_bytes", [1e-3, 1.0, 1e12, 1e18])
def test_flows_of_any_size_end(num_bytes):
    link = Resource("link", 64e9)
    starts = [
        (0.1 * index, num_bytes * (1 + index / 3), {link: 1 + index / 7}, math.inf)
        for index in range(5)
    ]
    assert all(math.isfinite(end) for end in end_times(starts))


def test_nothing_to_move_ends_at_once():
    assert end_times([(2.0, 0.0, {Resource("link", 1.0): 1}, math.inf)]) == [2.0]


@st.composite
def crowds(draw):
    """Draw flows over a few resources, begun at any time."""
    number = draw(st.integers(1, 4))
    capacities = [draw(st.floats(0.5, 1e3)) for _ in range(number)]
    resources = [Resource(f"r{index}", capacity) for index, capacity in enumerate(capacities)]
    starts = []
    for _ in range(draw(st.integers(1, 8))):
        used = draw(st.lists(st.sampled_from(resources), min_size=1, unique=True))
        uses = {resource: draw(st.floats(0.1, 5.0)) for resource in used}
        limit = draw(st.just(math.inf) | st.floats(0.1, 1e3))
        starts.append((draw(st.floats(0, 10)), draw(st.floats(1e-6, 1e6)), uses, limit))
    return resources, starts


@settings(max_examples=150, deadline=None)
@given(crowd=crowds())
def test_every_byte_is_moved_once_and_no_faster_than_anything_allows(crowd):
    resources, starts = crowd
    ends = end_times(starts)
    for resource in resources:
        moved = sum(size * uses.get(resource, 0.0) for _, size, uses, _ in starts)
        assert resource.carried == pytest.approx(moved, rel=1e-6)
        assert resource.busy_seconds >= moved / resource.capacity * (1 - 1e-6)
        assert resource.busy_seconds <= max(ends) + 1e-9
    for (start, size, uses, limit), end in zip(starts, ends, strict=True):
        fastest = min([limit, *(r.capacity / share for r, share in uses.items())])
        assert end - start >= size / fastest * (1 - 1e-6)


@settings(max_examples=150, deadline=None)
@given(crowd=crowds())
def test_no_rate_could_be_raised_without_lowering_a_smaller_one(crowd):
    resources, starts = crowd
    done = simpy.Environment().event()
    flows = [Flow(size, uses, limit, done, size) for _, size, uses, limit in starts]
    rates = fair_rates(flows)
    used = {
        resource: sum(
            rate * flow.uses.get(resource, 0) for rate, flow in zip(rates, flows, strict=True)
        )
        for resource in resources
    }
    for resource in resources:
        assert used[resource] <= resource.capacity * (1 + 1e-9)
    for flow, rate in zip(flows, rates, strict=True):
        if rate >= flow.max_rate * (1 - 1e-9):
            continue
        bottlenecks = [r for r in flow.uses if used[r] >= r.capacity * (1 - 1e-9)]
        assert any(
            all(
                other_rate <= rate * (1 + 1e-9)
                for other, other_rate in zip(flows, rates, strict=True)
                if resource in other.uses
            )
            for resource in bottlenecks
        )


@settings(max_examples=100, deadline=None)
@given(crowd=crowds())
def test_the_same_flows_end_at_the_same_times(crowd):
    _, starts = crowd
    assert end_times(starts) == end_times(starts)


@pytest.mark.parametrize("capacity", [0.0, -1.0, math.inf, math.nan])
def test_a_bandwidth_with_which_nothing_ends_is_refused(capacity):
    with pytest.raises(ConfigError, match="capacity of link must be a positive number"):
        Resource("link", capacity)


@pytest.mark.parametrize(
    ("num_bytes", "uses", "rate", "words"),
    [
        (-1.0, {Resource("link", 1.0): 1}, math.inf, "bytes must be"),
        (math.nan, {Resource("link", 1.0): 1}, math.inf, "bytes must be"),
        (1.0, {}, math.inf, "needs a resource"),
        (1.0, {Resource("link", 1.0): 0}, math.inf, "needs a resource"),
        (1.0, {Resource("link", 1.0): 1}, 0.0, "needs a resource"),
    ],
)
def test_a_flow_that_would_never_end_is_refused(num_bytes, uses, rate, words):
    with pytest.raises(ConfigError, match=words):
        FluidNetwork(simpy.Environment()).send(num_bytes, uses, rate)
