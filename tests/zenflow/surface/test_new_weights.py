"""Weights and states from elsewhere: taken up where that is right, else refused aloud."""

import copy
import logging
import threading

import pytest
import torch
from torch import nn

from tests.models import TinyStack, assert_equal, closing, weights_of
from tests.zenflow.runs import CONFIG, MODES, make, take_steps
from zenflow import ZenFlowAdamW, ZenFlowConfig

both_modes = pytest.mark.parametrize("mode", MODES)


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for part in value for t in tensors_in(part)] if isinstance(value, list) else []


def weights_after(mode, steps, *, before=lambda model, optimizer: None):
    model, optimizer = make(mode)
    with closing(optimizer):
        before(model, optimizer)
        take_steps(model, optimizer, steps)
        optimizer.eval()
        return weights_of(model)


# ---- a state without steps ----------------------------------------------------------------------


@both_modes
def test_before_the_first_step_there_is_no_tensor_to_bring_anywhere(mode):
    model, optimizer = make(mode)
    with closing(optimizer):
        assert not tensors_in(optimizer.state_dict())
        assert not optimizer.state
        saved = copy.deepcopy(optimizer.state_dict())
        take_steps(model, optimizer, range(1))
        assert tensors_in(optimizer.state_dict())
        assert all("exp_avg" in optimizer.state[p] for p in model.parameters())
        optimizer.load_state_dict(saved)
        assert not tensors_in(optimizer.state_dict())
        assert not optimizer.state


@both_modes
def test_a_new_optimizer_takes_up_its_own_state(mode):
    """As Accelerate's `prepare` has it."""

    def prepare(model, optimizer):
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    assert_equal(weights_after(mode, range(9), before=prepare), weights_after(mode, range(9)))


@both_modes
@pytest.mark.parametrize("model_comes", ["first", "last"])
def test_a_used_optimizer_goes_back_to_the_start(mode, model_comes):
    def use(model, optimizer):
        start = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
        take_steps(model, optimizer, range(20, 27))  # updates are in flight
        for part in ("model", "optimizer") if model_comes == "first" else ("optimizer", "model"):
            if part == "model":
                model.load_state_dict(start[0])
            else:
                optimizer.load_state_dict(start[1])

    assert_equal(weights_after(mode, range(9), before=use), weights_after(mode, range(9)))


def test_a_state_with_steps_but_no_tensors_is_refused():
    model, optimizer = make()
    with closing(optimizer):
        take_steps(model, optimizer, range(3))
        saved = copy.deepcopy(optimizer.state_dict())
        saved["state"] = {}
        with pytest.raises(Exception, match="lacks or misshapes"):
            optimizer.load_state_dict(saved)


def test_hooks_of_saving_and_loading_see_what_torchs_would():
    model, optimizer = make()
    calls = []

    def saved(_, state):
        calls.append(("saved", bool(state["param_groups"][0]["zenflow"])))
        return {**state, "note": 7}

    def loading(_, state):
        calls.append(("loading", state.pop("note")))

    def replaced(_, state):
        return {**state, "param_groups": [{**g, "lr": 0.25} for g in state["param_groups"]]}

    with closing(optimizer):
        optimizer.register_state_dict_post_hook(saved)
        optimizer.register_load_state_dict_pre_hook(loading)
        optimizer.register_load_state_dict_pre_hook(replaced)
        optimizer.register_load_state_dict_post_hook(lambda _: calls.append("loaded"))
        take_steps(model, optimizer, range(3))
        state = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(state)
        assert state["note"] == 7  # the caller's own dict stays
        assert optimizer.param_groups[0]["lr"] == 0.25
    assert calls == [("saved", True), ("loading", 7), "loaded"]


@both_modes
@pytest.mark.parametrize("shown", [False, True], ids=["weights of training", "true weights"])
@pytest.mark.parametrize("comes_last", ["model", "optimizer"])
def test_a_checkpoint_goes_on_bit_for_bit_or_tells_why_not(mode, shown, comes_last, caplog):
    """Behind the optimizer's state, true weights take the place of those of training."""
    whole, expected = make(mode)
    model, optimizer = make(mode, model=TinyStack(num_layers=4, seed=5))
    with closing(expected), closing(optimizer), caplog.at_level(logging.WARNING):
        take_steps(whole, expected, range(5))
        if shown:
            expected.eval()
        saved = copy.deepcopy([whole.state_dict(), expected.state_dict()])
        expected.train()
        take_steps(model, optimizer, range(20, 23))
        parts = [(model, saved[0]), (optimizer, saved[1])]
        for part, state in parts if comes_last == "optimizer" else reversed(parts):
            part.load_state_dict(state)
        take_steps(model, optimizer, range(5, 9))
        take_steps(whole, expected, range(5, 9))
        is_same = all(map(torch.equal, weights_of(model), weights_of(whole)))
    told = "Load the model first, then the optimizer" in caplog.text
    assert is_same != told
    assert told == (shown and comes_last == "model")


@both_modes
@pytest.mark.parametrize("call", ["step", "eval"])
def test_another_models_weights_behind_a_state_are_noticed(mode, call):
    model, optimizer = make(mode)
    with closing(optimizer):
        take_steps(model, optimizer, range(5))
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        model.load_state_dict(TinyStack(num_layers=4, seed=5).state_dict())
        with pytest.raises(RuntimeError, match="adopt_weights"):
            take_steps(model, optimizer, [5]) if call == "step" else optimizer.eval()
        optimizer.zero_grad()
        optimizer.adopt_weights()
        take_steps(model, optimizer, [5])


# ---- other weights in mid-run -------------------------------------------------------------------

CHANGES = {
    "in place": lambda p: p.mul_(0.5),
    "by .data": lambda p: setattr(p, "data", 0.5 * p.data),
}


@both_modes
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("call", ["step", "eval", "train"])
def test_weights_that_somebody_else_has_changed_are_noticed(call, change, mode):
    model, optimizer = make(mode)
    with closing(optimizer):
        take_steps(model, optimizer, range(5))
        if call == "train":
            optimizer.eval()
        with torch.no_grad():
            CHANGES[change](model.layers[1].weight)
        before = weights_of(model)
        with pytest.raises(RuntimeError, match="adopt_weights"):
            take_steps(model, optimizer, [5]) if call == "step" else getattr(optimizer, call)()
        if call != "step":
            assert_equal(weights_of(model), before)  # and not undone


@both_modes
def test_a_block_of_true_weights_nests_and_leaves_what_was_there(mode):
    model, optimizer = make(mode)
    with closing(optimizer):
        take_steps(model, optimizer, range(6))
        training = weights_of(model)
        with optimizer.true_weights():
            true = weights_of(model)
            with optimizer.true_weights():
                assert_equal(weights_of(model), true)
            assert_equal(weights_of(model), true)
        assert_equal(weights_of(model), training)
        optimizer.eval()
        with optimizer.true_weights():
            pass
        assert_equal(weights_of(model), true)
    assert any(not torch.equal(a, b) for a, b in zip(training, true, strict=True))


@both_modes
@pytest.mark.parametrize("shown", [False, True], ids=["weights of training", "true weights"])
def test_adopted_weights_are_gone_on_from(shown, mode):
    """Nothing of the weights before comes back; a learning rate of 0 shows it."""
    model, optimizer = make(mode)
    with closing(optimizer):
        take_steps(model, optimizer, range(7))
        if shown:
            optimizer.eval()
        others = TinyStack(num_layers=4, seed=5)
        model.load_state_dict(others.state_dict())
        optimizer.adopt_weights()
        assert optimizer.state_dict()["state"][0]["exp_avg"].any()  # moments stay
        optimizer.param_groups[0].update(lr=0.0)
        for step in range(7, 16):
            take_steps(model, optimizer, [step])
            assert_equal(weights_of(model), weights_of(others), f"step {step}")
        optimizer.eval()
        assert_equal(weights_of(model), weights_of(others))


def test_a_late_cast_is_named():
    model, optimizer = make()
    with closing(optimizer):
        model.to(torch.bfloat16)
        with pytest.raises(RuntimeError, match=r"cast from torch.float32 to torch.bfloat16"):
            take_steps(model, optimizer, [0])


# ---- what can't be trained, and what is of no use -----------------------------------------------


def test_float64_is_refused():
    with pytest.raises(ValueError, match="float64: only float32"):
        ZenFlowAdamW(nn.Linear(4, 4).double().parameters())


def test_a_step_without_any_gradient_is_told_once(caplog):
    _, optimizer = make()
    with closing(optimizer), caplog.at_level(logging.WARNING):
        for _ in range(3):
            optimizer.step()
    assert [r.message for r in caplog.records if "has a gradient" in r.message] == [
        "no parameter of this optimizer has a gradient: was the model wrapped (PEFT), copied or "
        "frozen after the optimizer was made? Under FSDP2: did the last pass before step() reduce "
        "gradients (set_requires_gradient_sync)?"
    ]


def test_torchs_implementation_flags_change_nothing_and_are_told(caplog):
    caplog.set_level(logging.INFO)
    results = []
    for flags in ({}, {"fused": True, "foreach": False}):
        model = TinyStack(num_layers=2)
        with closing(ZenFlowAdamW(model.parameters(), config=CONFIG, **flags)) as optimizer:
            take_steps(model, optimizer, range(3))
        results.append(weights_of(model))
    assert_equal(*results)
    assert [r.message for r in caplog.records if "no effect" in r.message] == [
        "foreach, fused: of no effect here, they choose among torch's own"
    ]


@pytest.mark.parametrize(
    ("config", "tells"), [(ZenFlowConfig(), True), (ZenFlowConfig.preset("on_device"), False)]
)
def test_where_nothing_is_offloaded_no_thread_starts_and_it_is_told(config, tells, caplog):
    before = set(threading.enumerate())
    model = TinyStack()
    with (
        caplog.at_level(logging.WARNING),
        closing(ZenFlowAdamW(model.parameters(), config=config)) as optimizer,
    ):
        take_steps(model, optimizer, range(3))
        optimizer.eval()
        optimizer.train()
        optimizer.state_dict()
        assert set(threading.enumerate()) <= before
    told = [r.message for r in caplog.records if "are offloaded" in r.message]
    assert bool(told) == tells


@pytest.mark.parametrize(
    ("module", "least", "reasons"),
    [
        (nn.Linear(8, 8), 100, "1 with fewer elements than min_split_elements=100, 1 with fewer "
         "than two dimensions"),
        (nn.LayerNorm(8), 0, "2 with fewer than two dimensions"),
        (nn.Conv2d(8, 8, 3, bias=False).to(memory_format=torch.channels_last), 0,
         "1 with a kernel in memory that is not contiguous"),
    ],
)  # fmt: skip
def test_why_nothing_is_offloaded_is_told(module, least, reasons, caplog):
    config = ZenFlowConfig(min_split_elements=least)
    with closing(ZenFlowAdamW(module.parameters(), config=config)):
        (told,) = [r.message for r in caplog.records if "are offloaded" in r.message]
    assert f"On the device whole are: {reasons}. " in told
