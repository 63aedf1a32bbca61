"""States: resumed bit for bit, hooks, other devices and dtypes, and nothing shared."""

import copy
import io
import json

import pytest
import torch
from torch import nn

from tests.models import assert_equal
from tests.zenflow.conformance.subjects import affine, train
from tests.zenflow.test_usage import map_tensors


def trained(make, num_steps=5, **settings):
    problem = affine(**settings)
    optimizer = problem.made_by(make)
    train(problem, optimizer, num_steps)
    return problem, optimizer


def resumed(make, problem, state, **settings):
    """Return a copy of a problem with an optimizer that has loaded a state."""
    other = affine(**settings)
    optimizer = other.made_by(make)
    with torch.no_grad():
        for p, q in zip(other.tensors, problem.tensors, strict=True):
            p.copy_(q)
    optimizer.load_state_dict(state)
    return other, optimizer


def engine_of(state):
    """Return what a state has beside its tensors, but for the report."""
    return {**json.loads(state["param_groups"][0]["zenflow"]), "report": None}


def assert_same_state(actual, expected):
    """Compare all of a state but the report, which has times."""
    plain = []
    for state in (actual, expected):
        first, *others = state["param_groups"]
        timeless = {**state, "param_groups": [{**first, "zenflow": engine_of(state)}, *others]}
        plain.append(map_tensors(timeless, lambda t: (t.dtype, t.tolist())))
    assert plain[0] == plain[1]


NAMED = {"params": lambda w, b: [("weight", w), ("bias", b)]}


@pytest.mark.parametrize("there", [{}, NAMED], ids=["", "named there"])
@pytest.mark.parametrize("here", [{}, NAMED], ids=["", "named here"])
def test_a_resumed_run_goes_on_bit_for_bit_with_names_or_without(make, there, here):
    problem, optimizer = trained(make, **there)
    other, again = resumed(make, problem, copy.deepcopy(optimizer.state_dict()), **here)
    for _ in range(5):
        train(problem, optimizer, 1)
        train(other, again, 1)
        assert_equal(other.weights(), problem.weights())
    for state in (found := [copy.deepcopy(each.state_dict()) for each in (optimizer, again)]):
        names = state["param_groups"][0].pop("param_names", None)
        assert names == (["weight", "bias"] if there or (here and state is found[1]) else None)
    assert_same_state(*found)


@pytest.mark.parametrize("weights_only", [True, False])
def test_a_state_is_itself_after_torch_save(make, weights_only):
    _, optimizer = trained(make)
    file, state = io.BytesIO(), optimizer.state_dict()
    torch.save(state, file)
    file.seek(0)
    assert_same_state(torch.load(file, weights_only=weights_only), state)


def test_loading_changes_neither_the_state_nor_shares_anything_with_it(make):
    problem, optimizer = trained(make, lr=torch.tensor(0.01))
    state = optimizer.state_dict()
    kept = copy.deepcopy(state)
    other, again = resumed(make, problem, state, lr=torch.tensor(0.01))
    assert_same_state(state, kept)
    train(other, again)
    again.param_groups[0]["lr"].fill_(0.5)
    assert_same_state(state, kept)
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.01)


@pytest.mark.parametrize("change", ["float64", "another device"])
def test_a_state_of_another_dtype_or_device_is_brought_to_its_place(make, change):
    problem, optimizer = trained(make)

    def moved(tensor):
        if change == "float64":
            return tensor.double() if tensor.is_floating_point() else tensor
        return nn.Parameter(tensor.clone(), requires_grad=False)  # a tensor of another kind

    state = map_tensors(copy.deepcopy(optimizer.state_dict()), moved)
    other, again = resumed(make, problem, state)
    dtypes = {t.dtype for entry in again.state_dict()["state"].values() for t in entry.values()}
    assert torch.float64 not in dtypes
    train(problem, optimizer, 5)
    train(other, again, 5)
    assert_equal(other.weights(), problem.weights())


def test_a_setting_that_an_older_state_lacks_keeps_its_value(make):
    problem, optimizer = trained(make, eps=1e-6)
    state = copy.deepcopy(optimizer.state_dict())
    del state["param_groups"][0]["eps"]
    _, again = resumed(make, problem, state, eps=1e-5)
    assert again.param_groups[0]["eps"] == 1e-5


def test_after_a_step_every_parameter_has_state(make):
    problem, optimizer = trained(make, 1)
    assert optimizer.state.keys() == set(problem.tensors)
    assert all(optimizer.state.values())


# ---- hooks --------------------------------------------------------------------------------------


def test_hooks_before_and_after_saving_are_called_with_the_whole_state(make):
    _, optimizer = trained(make)
    optimizer.register_state_dict_pre_hook(lambda opt: opt.state.update(noted=1))
    assert optimizer.state_dict()["state"]["noted"] == 1

    def without_note(opt, state):
        assert engine_of(state)["step"] == 5
        noted = state["state"].pop("noted")
        return {**state, "noted": noted}  # replaces what is saved

    optimizer.register_state_dict_post_hook(without_note)
    saved = optimizer.state_dict()
    assert saved["noted"] == 1
    assert "noted" not in saved["state"]


def in_place(_, state):
    state["param_groups"][0]["lr"] = 0.2


def replaced(_, state):
    state = copy.deepcopy(state)
    state["param_groups"][0]["lr"] = 0.3
    return state


@pytest.mark.parametrize(
    ("hooks", "lr"),
    [
        ([(in_place, False)], 0.2),
        ([(replaced, False)], 0.3),
        ([(in_place, False), (replaced, False)], 0.3),
        ([(in_place, False), (replaced, True)], 0.2),
    ],
    ids=["in place", "replaced", "the last one counts", "prepended"],
)
def test_hooks_before_loading_change_or_replace_the_state(make, hooks, lr):
    problem, optimizer = trained(make)
    for hook, prepend in hooks:
        optimizer.register_load_state_dict_pre_hook(hook, prepend=prepend)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert optimizer.param_groups[0]["lr"] == lr
    train(problem, optimizer, 2)


def test_a_hook_after_loading_sees_what_was_loaded(make):
    _, optimizer = trained(make)
    seen = []
    optimizer.register_load_state_dict_pre_hook(replaced)
    optimizer.register_load_state_dict_post_hook(
        lambda opt: seen.append(opt.param_groups[0]["lr"])
    )
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [0.3]
