"""`torch.distributed.checkpoint` saves and loads the whole state, in one process and in two."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from tests.forks import FORKS, exit_codes
from tests.models import OddShapes, TinyStack, assert_equal, closing, two_groups, weights_of
from tests.zenflow.runs import CONFIG, MODES
from tests.zenflow.surface import data_parallel_run
from tests.zenflow.test_resume import config_of
from zenflow import ZenFlowAdamW

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

OPTIONS = {"nested": {}, "flat": {"flatten_optimizer_state_dict": True}}


class Run:
    def __init__(self, rule, mode, seed=0, dtype=torch.float32):
        self.model = OddShapes(seed=seed, dtype=dtype)
        self.optimizer = ZenFlowAdamW(
            two_groups(self.model), config=config_of(rule), **MODES[mode]
        )

    def steps(self, steps):
        for step in steps:
            self.model.loss(step, idle=True).backward()
            self.optimizer.step()
        return weights_of(self.model)


@pytest.mark.parametrize("form", OPTIONS)
@pytest.mark.parametrize(
    ("rule", "mode", "dtype"),
    [
        ("exact", "release", torch.bfloat16),
        ("exact", "keep", torch.float32),
        ("published", "release", torch.float32),
        ("warm-up", "release", torch.float32),
        ("only important", "keep", torch.float32),
    ],
)
def test_a_run_resumes_bit_for_bit_from_a_distributed_checkpoint(
    mode, form, rule, dtype, tmp_path
):
    options = StateDictOptions(**OPTIONS[form])
    whole = Run(rule, mode, dtype=dtype)
    with closing(whole.optimizer):
        whole.steps(range(5))
        dcp.save(dict_of(whole, options), checkpoint_id=tmp_path)
        expected = whole.steps(range(5, 9))
    again = Run(rule, mode, seed=7, dtype=dtype)
    with closing(again.optimizer):
        state = dict_of(again, options)
        dcp.load(state, checkpoint_id=tmp_path)
        set_state_dict(
            again.model,
            again.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=options,
        )
        assert_equal(again.steps(range(5, 9)), expected)


def dict_of(run, options):
    model, optimizer = get_state_dict(run.model, run.optimizer, options=options)
    return {"model": model, "optimizer": optimizer}


def test_a_used_run_goes_back_by_a_state_of_names():
    options = StateDictOptions()
    run = Run("exact", "release")
    with closing(run.optimizer):
        run.steps(range(4))
        model = copy.deepcopy(run.model.state_dict())
        saved = copy.deepcopy(get_optimizer_state_dict(run.model, run.optimizer, options=options))
        assert "embed.weight" in saved["state"]
        expected = run.steps(range(4, 8))
        run.model.load_state_dict(model)
        set_optimizer_state_dict(run.model, run.optimizer, saved, options=options)
        assert_equal(run.steps(range(4, 8)), expected)


@pytest.mark.parametrize("mode", MODES)
def test_a_state_asked_for_right_after_loading_is_what_was_loaded(mode):
    """Torch takes a step of its own with an optimizer that seems to have no state."""
    run, again = Run("exact", mode), Run("exact", mode, seed=7)
    with closing(run.optimizer), closing(again.optimizer):
        run.steps(range(4))
        again.model.load_state_dict(run.model.state_dict())
        again.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
        get_state_dict(again.model, again.optimizer)
        assert_equal(again.steps(range(4, 8)), run.steps(range(4, 8)))


@pytest.mark.parametrize("mode", MODES)
def test_a_plain_state_is_saved_and_loaded_in_place(mode, tmp_path):
    """As `dcp.save({"optimizer": optimizer.state_dict()})` has it."""
    whole = Run("exact", mode)
    with closing(whole.optimizer):
        whole.steps(range(6))
        parts = {"model": whole.model.state_dict(), "optimizer": whole.optimizer.state_dict()}
        dcp.save(parts, checkpoint_id=tmp_path)
        expected = whole.steps(range(6, 9))
    again = Run("exact", mode, seed=7)
    with closing(again.optimizer):
        again.steps(range(20, 23))  # another phase of the windows: other updates are in flight
        parts = {"model": again.model.state_dict(), "optimizer": again.optimizer.state_dict()}
        dcp.load(parts, checkpoint_id=tmp_path)
        again.model.load_state_dict(parts["model"])
        again.optimizer.load_state_dict(parts["optimizer"])
        assert_equal(again.steps(range(6, 9)), expected)


@pytest.mark.parametrize("mode", MODES)
def test_names_and_shapes_are_the_same_at_every_step(mode):
    run = Run("exact", mode)
    with closing(run.optimizer):
        found = set()
        for step in range(9):
            run.steps([step])
            state = run.optimizer.state_dict()["state"]
            found.add(
                str(
                    {
                        key: {name: (tuple(t.shape), t.dtype) for name, t in entry.items()}
                        for key, entry in state.items()
                    }
                )
            )
            assert all(t.is_contiguous() for entry in state.values() for t in entry.values())
        assert len(found) == 1


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_ranks_resume_bit_for_bit_and_one_process_loads_what_they_saved(tmp_path):
    ranks = [
        FORKS.Process(target=data_parallel_run.main, args=(rank, tmp_path)) for rank in (0, 1)
    ]
    for rank in ranks:
        rank.start()
    codes = exit_codes(ranks, seconds=120)
    assert codes == [0, 0], [(tmp_path / f"error-{rank}").read_text() for rank in (0, 1)]
    first, second = ((tmp_path / f"sum-{rank}").read_text() for rank in (0, 1))
    assert first == second
    model = TinyStack(num_layers=3, seed=7)
    with closing(ZenFlowAdamW(model.parameters(), config=CONFIG)) as optimizer:
        model_state, state = get_state_dict(model, optimizer)
        loaded = {"model": model_state, "optimizer": state}
        dcp.load(loaded, checkpoint_id=tmp_path / "saved")
        set_state_dict(
            model,
            optimizer,
            model_state_dict=loaded["model"],
            optim_state_dict=loaded["optimizer"],
        )
        assert str(data_parallel_run.true_sum(model, optimizer)) == first
