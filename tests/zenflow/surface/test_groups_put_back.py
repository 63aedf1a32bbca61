"""Parameter groups that somebody puts in the place of the optimizer's, as on resuming."""

import copy

import pytest
import torch

from tests.models import TinyStack, assert_equal, closing, two_groups, weights_of
from tests.zenflow.runs import CONFIG, MODES
from zenflow import ZenFlowAdamW

both_modes = pytest.mark.parametrize("mode", MODES)


def made(mode):
    model = TinyStack(num_layers=4)
    return model, ZenFlowAdamW(two_groups(model), config=CONFIG, **MODES[mode])


def take_step(model, optimizer, step):
    model.loss(step).backward()
    optimizer.step()


def copied(optimizer):
    """Return new groups with copies of the settings and the parameters themselves."""
    return [
        {key: value if key == "params" else copy.deepcopy(value) for key, value in group.items()}
        for group in optimizer.param_groups
    ]


def without_ours(groups):
    """Return groups as torch's AdamW has them."""
    return [{key: value for key, value in group.items() if key != "zenflow"} for group in groups]


def assign(optimizer, groups):
    optimizer.param_groups = groups


def assign_inside(optimizer, groups):
    optimizer.param_groups[:] = groups


def with_new_lists(optimizer, groups):
    optimizer.param_groups = [{**group, "params": list(group["params"])} for group in groups]


def with_tensors(optimizer, groups):
    for group in groups:
        group["lr"] = torch.tensor(float(group["lr"]), dtype=torch.float64)
    assign(optimizer, groups)


def loaded(optimizer, groups):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assign(optimizer, without_ours(groups))


WAYS = [assign, assign_inside, with_new_lists, with_tensors, loaded]


def trained(mode, put_back, num_steps=12):
    """Train with rates that change through the groups, which may have been put back before."""
    model, optimizer = made(mode)
    with closing(optimizer):
        for step in range(num_steps):
            if step in (3, 7) and put_back is not None:
                put_back(optimizer, copied(optimizer))
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * 0.7
            take_step(model, optimizer, step)
        with optimizer.true_weights():
            assert optimizer.state_dict()["param_groups"][0]["zenflow"]
            assert optimizer.param_groups[0]["zenflow"] == ""
            return weights_of(model)


@pytest.mark.parametrize("put_back", WAYS, ids=lambda way: way.__name__)
@both_modes
def test_equal_groups_in_the_place_of_the_optimizers_are_gone_by(mode, put_back):
    """Also by the fresh steps, which read the settings in backward."""
    assert_equal(trained(mode, put_back), trained(mode, None))


def reversed_groups(groups):
    return groups[::-1]


def swapped_within(groups):
    return [{**group, "params": group["params"][::-1]} for group in groups]


def one_less(groups):
    return [groups[0], {**groups[1], "params": groups[1]["params"][1:]}]


def merged(groups):
    return [{**groups[0], "params": [p for group in groups for p in group["params"]]}]


def cut_elsewhere(groups):
    """Another group has the last matrix, in the same order of parameters."""
    first, second = groups
    return [
        {**first, "params": first["params"][:-1]},
        {**second, "params": [first["params"][-1], *second["params"]]},
    ]


def copies(groups):
    return copy.deepcopy(groups)


def numbers(groups):
    return [{**group, "params": list(range(len(group["params"])))} for group in groups]


def none(groups):
    return []


def without(name):
    def lack(groups):
        return [groups[0], {key: value for key, value in groups[1].items() if key != name}]

    lack.__name__ = f"without {name}"
    return lack


def as_text(groups):
    return [groups[0], {**groups[1], "lr": "1e-3"}]


OTHERS = (reversed_groups, swapped_within, one_less, merged, cut_elsewhere, copies, numbers, none)
PUT_OTHERS = "param_groups have other parameters .* change their settings"
REFUSED = [
    *[(change, PUT_OTHERS) for change in OTHERS],
    *[
        (without(name), f"parameter group 1 lacks {name}: .* set them")
        for name in ("lr", "betas", "eps", "weight_decay")
    ],
    (as_text, "lr must be a number, got the text '1e-3'"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=lambda x: getattr(x, "__name__", ""))
@both_modes
def test_groups_that_are_not_the_optimizers_are_refused_before_the_next_step(
    mode, change, message
):
    """And once they are put right the run goes on as if nothing had been."""
    model, optimizer = made(mode)
    with closing(optimizer):
        for step in range(8):
            if step == 5:
                right = list(optimizer.param_groups)
                optimizer.param_groups = change(copied(optimizer))
                before = weights_of(model)
                with pytest.raises((RuntimeError, ValueError, TypeError), match=message):
                    take_step(model, optimizer, step)
                assert_equal(weights_of(model), before)
                optimizer.param_groups = right
                optimizer.zero_grad()
            take_step(model, optimizer, step)
        with optimizer.true_weights():
            found = weights_of(model)
    model, optimizer = made(mode)
    with closing(optimizer):
        for step in range(8):
            take_step(model, optimizer, step)
        with optimizer.true_weights():
            assert_equal(found, weights_of(model))


@both_modes
def test_a_setting_that_is_taken_away_in_place_is_asked_for_before_the_next_step(mode):
    model, optimizer = made(mode)
    with closing(optimizer):
        del optimizer.param_groups[1]["weight_decay"]
        with pytest.raises(ValueError, match="parameter group 1 lacks weight_decay"):
            take_step(model, optimizer, 0)
