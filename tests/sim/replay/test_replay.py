"""A replay in C says what SimPy says of the same schedule, on whatever machine."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.hardware.catalog import find_machine
from sim.machine import Machine, Rates
from sim.models.table import find_model
from sim.models.workload import Workload
from sim.replay.arrays import RATES, StepArrays, TapeArrays
from sim.replay.library import replay_library
from sim.replay.record import TapedSchedule, record
from sim.replay.stand_ins import TapeCosts, TapeMachine
from sim.replay.steady import Recording, recording_of
from sim.replay.tape import CannotRecordError, times_of
from sim.schedules.zenflow import EngineSchedule
from sim.simulate import Strategy, selects_every, simulate
from sim.timing.block_plan import structure_of
from sim.timing.costs import costs_of

FIGURES = ("step_seconds", "stall_seconds", "selection_seconds", "d2h_bytes", "h2d_bytes")
needs_c = pytest.mark.skipif(replay_library() is None, reason="the replay is not built")

knobs = st.fixed_dictionaries({
    "select_interval": st.sampled_from([0, 10, 100]),
    "update_interval": st.sampled_from([1, 2, 3, 4, 8]),
    "topk_ratio": st.sampled_from([0.0, 0.05, 0.3, 0.6, 1.0]),
    "full_warm_up_rounds": st.sampled_from([0, 0, 3]),
    "overlap_step": st.sampled_from([True, True, True, False]),
})  # fmt: skip
strategies = st.one_of(
    st.builds(
        lambda given, depth: Strategy.of("zenflow", queue_depth=depth, **given),
        knobs, st.sampled_from([None, 1, 2]),
    ),
    st.builds(lambda given: Strategy.of("zenflow_paper", **given), knobs),
    st.sampled_from([Strategy.of(name) for name in ("zero_offload", "delayed", "on_device")]),
)  # fmt: skip
factors = st.fixed_dictionaries({
    "link.d2h": st.floats(0.1, 2.0), "link.h2d": st.floats(0.1, 2.0),
    "host.core_bandwidth": st.floats(0.02, 4.0), "host.dram": st.floats(0.03, 3.0),
    "host.core_update": st.floats(0.03, 3.0), "device.bandwidth": st.floats(0.3, 2.0),
    "overheads.select": st.floats(0.1, 50.0),
})  # fmt: skip


def machine(factors, duplex):
    base = find_machine("hgx-h200", 1)
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


def rates(*given):
    return np.array([[getattr(Rates.of(own.hardware), name) for name in RATES] for own in given])


def every(strategy):
    return selects_every(strategy.config)


def assert_same(found, index, predicted):
    for name in FIGURES:
        scale = predicted.step_seconds if name.endswith("seconds") else 1.0
        assert getattr(found, name)[index] == pytest.approx(
            getattr(predicted, name), rel=1e-9, abs=1e-9 * scale
        ), name


@needs_c
@given(
    strategies, factors, factors, st.sampled_from([1.0, 0.75, 0.6]), st.sampled_from([1, 2]),
    st.sampled_from([1, 4, 16]),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_a_replay_is_what_simpy_says(strategy, first, second, duplex, accumulation, batch):
    # Two machines at once, on a recording of the first alone.
    both = [costs(machine(own, duplex), batch, accumulation) for own in (first, second)]
    recording = recording_of(both[0], strategy)
    times = np.array([times_of(own) for own in both])
    found = recording.steady(rates(*both), times, every(strategy))
    for index, own in enumerate(both):
        assert_same(found, index, simulate(own, strategy, keeps_spans=False))


@needs_c
def test_every_step_ends_when_it_does_by_simpy():
    strategy = Strategy.of("zenflow", update_interval=3, select_interval=0)
    own = costs(machine({"host.core_bandwidth": 0.1, "link.d2h": 0.3}, 0.6), model="gpt2")
    simulated = Machine(own.hardware)
    schedule = EngineSchedule(simulated, own, strategy.config)
    simulated.run(schedule.run(30))
    recording = recording_of(own, strategy)
    plain, _ = recording._tapes_behind(18)
    done = plain.replay(rates(own), np.array([times_of(own)]))
    count = done.ends.shape[1]
    assert count >= 24
    np.testing.assert_allclose(done.ends[0], schedule.step_ends[:count], rtol=1e-12)
    np.testing.assert_allclose(done.stalls[0], schedule.stalls[:count], rtol=1e-9, atol=1e-12)


@needs_c
def test_a_queue_that_grows_is_waited_for():
    slow = costs(machine({"link.d2h": 0.02}, 1.0))
    for strategy in (
        Strategy.of("zenflow_paper", update_interval=8),
        # Selections come in another phase of a window where it settles twice as long.
        Strategy.of("zenflow_paper", update_interval=8, full_warm_up_rounds=3),
    ):
        times = np.array([times_of(slow)])
        found = recording_of(slow, strategy).steady(rates(slow), times, every(strategy))
        assert_same(found, 0, simulate(slow, strategy, keeps_spans=False))


@needs_c
def test_costs_of_one_structure_share_a_recording():
    fast = costs(machine({"device.bandwidth": 2.0}, 1.0), batch=8)
    plain = Strategy.of("zenflow")
    assert recording_of(fast, plain) is recording_of(costs(find_machine("hgx-h200", 1)), plain)
    other = Strategy.of("zenflow", update_interval=8)
    assert recording_of(fast, other) is not recording_of(fast, plain)
    scarce = fast.hardware.with_values({"host.dram_bytes": 9e9})
    less = replace(fast, hardware=scarce)
    assert recording_of(less, plain) is not recording_of(fast, plain)
    # Settings that change no step, or only how often one is taken, share it as well.
    for changes in ({"select_interval": 7}, {"queue_depth": 4}, {"queue_depth": 9}):
        assert recording_of(fast, Strategy.of("zenflow", **changes)) is recording_of(fast, plain)
    assert recording_of(fast, Strategy.of("zenflow", queue_depth=2)) is not recording_of(
        fast, plain
    )


def test_what_no_tape_can_hold_is_left_to_simpy():
    own = costs(find_machine("hgx-h200", 1))
    for given_costs, strategy in (
        (own, Strategy.of("superoffload")),
        (own, Strategy.of("zenflow", releases=False)),
        (costs(find_machine("hgx-h200", 2)), Strategy.of("zenflow")),
        (costs(find_machine("hgx-h200", 1, num_hosts=2)), Strategy.of("zenflow")),
    ):
        with pytest.raises(CannotRecordError):
            recording_of(given_costs, strategy)


def test_a_recording_ends_where_it_repeats():
    own = costs(find_machine("hgx-h200", 1))
    config = Strategy.of("zenflow", update_interval=4, select_interval=0).config
    recorded = record(own, config, 0)
    assert recorded.num_steady == 9
    assert len(recorded.selecting) == 5


@needs_c
@given(strategies, st.sampled_from([3, 6]))
@settings(max_examples=25, deadline=None)
def test_steps_that_come_again_are_as_they_would_be_recorded(strategy, windows):
    own = costs(find_machine("hgx-h200", 1), model="gpt2")
    structure = structure_of(own, strategy.config)
    # Twice a warm-up is another phase of a window than once.
    settling = windows // 3 * strategy.warm_up + windows * strategy.period
    tapes = Recording(structure)._tapes_behind(settling)
    for found, selects in zip(tapes, (False, True), strict=True):
        machine = TapeMachine(own)
        schedule = TapedSchedule(machine, own, structure.config)
        schedule.costs = TapeCosts(own)
        for step in range(found._num_steps):
            schedule.selects_next = selects and step == settling
            schedule.next_state()
        whole = TapeArrays(StepArrays(machine.tape), range(found._num_steps), settling)
        for name, array in whole._arrays.items():
            np.testing.assert_array_equal(found._arrays[name], array, err_msg=name)
        times = np.array([times_of(own)])
        for places in ("_seconds", "_sleep"):
            sums = [
                tape._recorded.seconds(times)[0, getattr(tape, places)] for tape in (found, whole)
            ]
            np.testing.assert_array_equal(*sums)
