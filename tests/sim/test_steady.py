"""A steady state in C is what SimPy says of the same schedule, on whatever machine."""

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim import steady as steady_states
from sim.hardware.catalog import find_machine
from sim.models.table import find_model
from sim.models.workload import Workload
from sim.replay.arrays import rates_of
from sim.replay.library import replay_library
from sim.replay.record import record
from sim.replay.tape import CannotRecordError, times_of
from sim.simulate import Strategy, simulate
from sim.steady import steady, steady_many
from sim.timing.block_plan import structure_of
from sim.timing.costs import costs_of
from tests.autotune.worlds import machine as cpu_machine

MEANS = ("step_seconds", "stall_seconds", "selection_seconds", "d2h_bytes", "h2d_bytes")
needs_c = pytest.mark.skipif(replay_library() is None, reason="the replay is not built")

knobs = st.fixed_dictionaries({
    "select_interval": st.sampled_from([0, 10, 100]),
    "update_interval": st.sampled_from([1, 2, 3, 4, 8]),
    "topk_ratio": st.sampled_from([0.0, 0.05, 0.3, 0.6, 1.0]),
    "full_warm_up_rounds": st.sampled_from([0, 0, 3]),
    "overlap_step": st.sampled_from([True, True, True, False]),
    "releases": st.sampled_from([True, True, False]),
})  # fmt: skip
strategies = st.one_of(
    st.builds(
        lambda given, depth, host_state: Strategy.of(
            "zenflow", queue_depth=depth, host_state=host_state, **given
        ),
        knobs, st.sampled_from([None, 1, 2]), st.sampled_from(["float32", "compact"]),
    ),
    st.builds(lambda given: Strategy.of("zenflow_paper", **given), knobs),
    st.sampled_from([Strategy.of(name) for name in ("zero_offload", "delayed", "on_device")]),
)  # fmt: skip
factors = st.fixed_dictionaries({
    "link.d2h": st.floats(0.1, 2.0), "link.h2d": st.floats(0.1, 2.0),
    "host.core_bandwidth": st.floats(0.02, 4.0), "host.dram": st.floats(0.03, 3.0),
    "host.core_update": st.floats(0.002, 3.0), "device.bandwidth": st.floats(0.3, 2.0),
    "overheads.select": st.floats(0.1, 50.0),
})  # fmt: skip
how_long = st.sampled_from([
    {}, {"num_steps": 2}, {"num_steps": 8, "settling_windows": 2, "longest_settling": 3},
])  # fmt: skip


def machine(factors, duplex, base=None):
    base = base or find_machine("hgx-h200", 1)
    columns = replace(base.overheads.device_update, value=base.overheads.device_update.value / 3)
    base = replace(base, overheads=replace(base.overheads, column_update=columns))
    figures = base.quantities()
    values = {name: factor * figures[name].value for name, factor in factors.items()}
    return base.with_values({**values, "link.duplex": duplex})


def costs(hardware, batch=4, accumulation=1, model="qwen2.5-0.5b"):
    workload = Workload.of_config(
        *find_model(model), batch_size=batch, sequence=512, accumulation=accumulation
    )
    return costs_of(workload, hardware)


def in_c(*given, **how):
    """Return a steady state without SimPy's help."""
    with patch.object(steady_states, "simulate", side_effect=AssertionError("not in C")):
        return steady(*given, **how)


def together(strategy, *given):
    rates = np.array([rates_of(own) for own in given])
    return steady_many(given[0], strategy, rates, np.array([times_of(own) for own in given]))


def assert_near(found, expected, scale, name):
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-9 * scale), name


def assert_same(found, predicted):
    scale = predicted.step_seconds
    for name in (*MEANS, "slowest_step_seconds", "update_seconds"):
        assert_near(getattr(found, name), getattr(predicted, name), scale, name)
    for name in ("busy_seconds", "passes"):
        own, other = getattr(found, name), getattr(predicted, name)
        assert own.keys() == other.keys()
        for key in own:
            assert_near(own[key], other[key], scale, key)


@needs_c
@given(
    strategies, factors, st.sampled_from([1.0, 0.75, 0.6]), st.sampled_from([1, 2]),
    st.sampled_from([("qwen2.5-0.5b", 1), ("qwen2.5-0.5b", 16), ("gpt2", 4)]), how_long,
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_a_steady_step_is_what_simpy_says(strategy, factors, duplex, accumulation, work, how):
    model, batch = work
    own = costs(machine(factors, duplex), batch, accumulation, model)
    assert_same(in_c(own, strategy, **how), simulate(own, strategy, **how))


@needs_c
@given(strategies, factors, st.sampled_from([1, 2]), st.booleans(), how_long)
@settings(max_examples=16, deadline=None)
def test_so_it_is_where_a_cpu_plays_the_device(strategy, factors, accumulation, pinned, how):
    own = costs(machine(factors, 1.0, cpu_machine()), 1, accumulation, "gpt2")
    assert own.hardware.device.is_cpu
    found = in_c(own, strategy, pinned=pinned, **how)
    assert_same(found, simulate(own, strategy, pinned=pinned, **how))


@needs_c
@given(strategies, factors, factors)
@settings(max_examples=12, deadline=None)
def test_machines_that_share_a_recording_are_each_as_by_itself(strategy, first, second):
    both = [costs(machine(own, 0.75)) for own in (first, second)]
    found = together(strategy, *both)
    for index, own in enumerate(both):
        predicted = simulate(own, strategy, keeps_spans=False)
        for name in MEANS:
            expected = getattr(predicted, name)
            assert_near(getattr(found, name)[index], expected, predicted.step_seconds, name)


@needs_c
def test_a_queue_that_grows_is_waited_for():
    slow = costs(machine({"link.d2h": 0.02}, 1.0))
    for strategy in (
        Strategy.of("zenflow_paper", update_interval=8),
        # Selections come in another phase of a window where it settles twice as long.
        Strategy.of("zenflow_paper", update_interval=8, full_warm_up_rounds=3),
    ):
        predicted = simulate(slow, strategy, keeps_spans=False)
        assert_same(steady(slow, strategy), predicted)
        assert together(strategy, slow, slow).step_seconds[1] == pytest.approx(
            predicted.step_seconds, rel=1e-9
        )


@needs_c
def test_costs_of_one_structure_share_a_recording():
    def recording_of(costs, strategy):
        return steady_states._recording_of(costs, strategy)

    fast = costs(machine({"device.bandwidth": 2.0}, 1.0), batch=8)
    plain = Strategy.of("zenflow")
    assert recording_of(fast, plain) is recording_of(costs(find_machine("hgx-h200", 1)), plain)
    # Settings that change no step, or only how often one is taken, share it as well.
    for changes in ({"select_interval": 7}, {"queue_depth": 4}, {"queue_depth": 9}):
        assert recording_of(fast, Strategy.of("zenflow", **changes)) is recording_of(fast, plain)
    for changes in ({"update_interval": 8}, {"queue_depth": 2}, {"releases": False}):
        other = Strategy.of("zenflow", **changes)
        assert recording_of(fast, other) is not recording_of(fast, plain)
    scarce = fast.hardware.with_values({"host.dram_bytes": 9e9})
    less = replace(fast, hardware=scarce)
    assert recording_of(less, plain) is not recording_of(fast, plain)


def test_what_no_tape_can_hold_is_left_to_simpy(monkeypatch):
    own = costs(find_machine("hgx-h200", 1), model="gpt2")
    cases = [
        (own, Strategy.of("superoffload")),
        (costs(find_machine("hgx-h200", 2), model="gpt2"), Strategy.of("zenflow")),
        (costs(find_machine("hgx-h200", 1, num_hosts=2), model="gpt2"), Strategy.of("zenflow")),
    ]
    for given_costs, strategy in cases:
        with pytest.raises(CannotRecordError):
            together(strategy, given_costs)
    monkeypatch.setattr(steady_states, "replay_library", lambda: None)
    for given_costs, strategy in [*cases, (own, Strategy.of("zenflow"))]:
        with pytest.raises(CannotRecordError):
            together(strategy, given_costs)
        assert_same(steady(given_costs, strategy), simulate(given_costs, strategy))


def test_a_recording_ends_where_it_repeats():
    own = costs(find_machine("hgx-h200", 1))
    config = Strategy.of("zenflow", update_interval=4, select_interval=0).config
    recorded = record(structure_of(own, config), 0)
    assert recorded.num_steady == 9
    assert recorded.num_steps == 9 + 5
