"""Compact states have less in them, and resume with the same bits."""

import copy
import io

import pytest
import torch

from tests.models import assert_equal, closing
from tests.zenflow.conformance.test_state import assert_same_state
from tests.zenflow.test_resume import NUM_STEPS, RULES, SCHEDULES, Run, config_of, uninterrupted
from zenflow import CheckpointError, ZenFlowConfig
from zenflow.columns.shards import Shards

DTYPES = [torch.float32, torch.bfloat16]
EACH_RULE = [
    pytest.param(
        rule, dtype, marks=() if place % 2 == index else pytest.mark.slow, id=f"{rule}, {dtype}"
    )
    for place, rule in enumerate(RULES)
    for index, dtype in enumerate(DTYPES)
]
"""Every rule, in one dtype; in the other the test is slow."""


def compact(run):
    """Return a run's compact state, through a file."""
    with run.optimizer.compact_states():
        state = run.optimizer.state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()))


def num_bytes(state):
    return sum(t.nbytes for entry in state["state"].values() for t in entry.values())


def check(steps, **settings):
    """Resume from a compact state of each of these steps, in another model."""
    saved, weights = {}, []
    with closing(Run(**settings)) as run:
        for step in range(NUM_STEPS):
            if step in steps:
                others = copy.deepcopy((run.model.state_dict(), run.schedule.state_dict()))
                saved[step] = [others[0], compact(run), others[1]]
            weights.append(run.step(step))
    for first, state in saved.items():
        with closing(Run(**settings, seed=7)) as other:
            other.load(state)
            for step in range(first, NUM_STEPS):
                what = f"resumed at {first}, step {step}"
                assert_equal(other.step(step), weights[step], what)


@pytest.mark.parametrize(("rule", "dtype"), EACH_RULE)
def test_a_compact_state_of_any_step_resumes_bit_for_bit(rule, dtype):
    # Elsewhere each compact state is the full one again, which resumes: a few steps are enough.
    # What is left out does not depend on the numbers' width: either has every other step.
    steps = range(dtype == torch.bfloat16, 9, 2) if "published" in rule else (1, 4, 6)
    check(steps, config=config_of(rule), mode="release", dtype=dtype)


@pytest.mark.parametrize("rule", ["exact", "published"])
@pytest.mark.parametrize("log", SCHEDULES.values(), ids=SCHEDULES)
def test_a_compact_state_resumes_bit_for_bit_where_knobs_changed(rule, log):
    steps = (1, 4, 7) if rule == "exact" else (2,)
    check(steps, config=config_of(rule), mode="release", log=log)


@pytest.mark.parametrize(
    ("rule", "dtype"), [case for case in EACH_RULE if "published" not in case.values[0]]
)
def test_a_compact_state_is_the_full_one_again_once_it_is_loaded(rule, dtype):
    settings = {"config": config_of(rule), "mode": "keep", "dtype": dtype}
    with closing(Run(**settings)) as run, closing(Run(**settings, seed=7)) as other:
        for step in range(7):
            run.step(step)
            full = run.optimizer.state_dict()
            other.optimizer.load_state_dict(compact(run))
            assert_same_state(other.optimizer.state_dict(), full)


def test_a_compact_state_under_eval_keeps_the_weights_of_training():
    settings = {"config": config_of("exact"), "mode": "keep"}
    weights, _ = uninterrupted(saves=(), **settings)
    with closing(Run(**settings)) as run, closing(Run(**settings, seed=7)) as other:
        for step in range(4):
            run.step(step)
        run.optimizer.eval()
        other.load([run.model.state_dict(), compact(run), run.schedule.state_dict()])
        for step in range(4, NUM_STEPS):
            assert_equal(other.step(step), weights[step])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_that_are_their_masters_rounded_are_not_in_a_compact_state(dtype):
    config = ZenFlowConfig.preset("zero_offload", min_split_elements=16)
    with closing(Run(config, "keep", dtype=dtype)) as run:
        for step in range(3):
            run.step(step)
            names = {name for entry in compact(run)["state"].values() for name in entry}
            assert not {"training_weight", "landing_weight"} & names
            assert {"master", "exp_avg", "deferred_columns"} <= names


def test_weights_that_fresh_steps_have_moved_are_in_a_compact_state():
    with closing(Run(config_of("exact"), "keep", dtype=torch.bfloat16)) as run:
        for step in range(3):
            run.step(step)
        state = compact(run)
        assert any("training_weight" in entry for entry in state["state"].values())
        assert num_bytes(state) < num_bytes(run.optimizer.state_dict())


def test_a_master_of_minus_zero_is_not_taken_for_a_weight_of_zero():
    config = ZenFlowConfig.preset("zero_offload", min_split_elements=16)
    with closing(Run(config, "keep")) as run:
        run.step(0)
        run.optimizer.state_dict()
        split = run.optimizer._running.layout.splits[0]
        split.host.state.master[0, 0] = -0.0
        split.weight()[0, split.deferred_columns[0]] = 0.0
        entry = compact(run)["state"]
        assert sum("training_weight" in tensors for tensors in entry.values()) == 1


@pytest.mark.parametrize("name", ["master", "training_weight", "landing_weight", "scores"])
def test_a_damaged_compact_state_is_refused_and_changes_nothing(name):
    with closing(Run(config_of("exact"), "keep")) as run:
        for step in range(4):
            run.step(step)
        good = compact(run)
        bad = copy.deepcopy(good)
        entry = next(e for e in reversed(bad["state"].values()) if name in e)
        del entry[name]
        with pytest.raises(CheckpointError, match=f"lacks or misshapes {name}"):
            run.optimizer.load_state_dict(bad)
        assert_same_state(compact(run), good)


def test_states_are_full_again_behind_the_block():
    with closing(Run(config_of("exact"), "keep")) as run:
        run.step(0)
        full = run.optimizer.state_dict()
        with pytest.raises(KeyError), run.optimizer.compact_states():
            raise KeyError
        assert_same_state(run.optimizer.state_dict(), full)


def test_ranks_that_have_some_rows_each_save_full_states():
    with closing(Run(config_of("exact"), "keep")) as run:
        run.step(0)
        full = run.optimizer.state_dict()
        run.optimizer._running.layout.shards = Shards(group=object())
        assert_same_state(compact(run), full)
