"""Factored second moments in the engine: one of each row and column, whoever owns a column."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings

from tests.factored_reference import FactoredCompactReference
from tests.models import GivenGradients, closing, weights_of
from tests.zenflow.step.test_compact_rule import check as check_compact
from tests.zenflow.test_reference import MODES, check_scenario, feed, scenarios
from zenflow import ConfigError, ZenFlowAdamW, ZenFlowConfig

TALL = (70, 9)
"""Shape of a parameter whose columns have two groups."""
FLIPPED = 12
"""Number of its weights that may be rounded the other way: engine and reference form quotients in
another order of operations, and a number may lie between two codes."""


def factored(scenario, **changes):
    """Return the scenario with factored second moments."""
    if scenario.config.topk_ratio == 1:  # where there would be nothing to factor
        changes["topk_ratio"] = 0.9
        log = [(step, dataclasses.replace(k, topk_ratio=0.9)) for step, k in scenario.log]
        scenario = dataclasses.replace(scenario, log=log)
    changes |= {"update_rule": "exact", "second_moment": "factored"}
    return dataclasses.replace(scenario, config=dataclasses.replace(scenario.config, **changes))


@settings(max_examples=15, deadline=None)
@given(mode=MODES, scenario=scenarios())
def test_weights_follow_the_reference(mode, scenario):
    check_scenario(factored(scenario), mode)


@settings(max_examples=6, deadline=None)
@given(mode=MODES, scenario=scenarios())
def test_bfloat16_weights_are_the_references_up_to_rounding(mode, scenario):
    check_scenario(factored(scenario), mode, torch.bfloat16)


@settings(max_examples=6, deadline=None)
@given(mode=MODES, scenario=scenarios())
def test_weights_over_four_bytes_of_state_follow_the_reference(mode, scenario):
    """Compact state, and gradients of eight bits."""
    scenario.shapes.append(TALL)
    few = {"host_state": "compact", "gradient_link": "e4m3"}
    few |= {"overlap_step": True, "full_warm_up_rounds": 0}
    kind = FactoredCompactReference
    check_compact(factored(scenario, **few), mode, is_random=False, kind=kind, most=FLIPPED)


def train(ratio, *, num_steps=30, owners=None, loss_scale=1.0, mode="keep"):
    """Return the true weights of a run, with these columns' owners if they are given."""
    model = GivenGradients([(48, 20), (6, 16)], torch.float32, 0)
    config = ZenFlowConfig(
        topk_ratio=ratio, second_moment="factored", min_split_elements=1, block_elements=300,
        select_interval=4, importance_decay=0.5,
    )  # fmt: skip
    options = {"lr": 1e-2, "config": config, "offload_gradients": mode}
    with closing(ZenFlowAdamW(model.parameters(), **options)) as optimizer:
        for step in range(1, num_steps + 1):
            grads = [loss_scale * grad for grad in model.draw_gradients(step, 0, 0.0)]
            if loss_scale != 1:
                optimizer.grad_scale, optimizer.found_inf = torch.tensor(loss_scale), None
            feed(model, optimizer, grads, mode, 0.5)
        optimizer.eval()
        return weights_of(model)


def test_the_owner_of_a_column_decides_nothing():
    """The masters are those of one optimizer, whatever k: columns move all the time."""
    for others in (train(0.0), train(0.7)):
        for one, other in zip(train(0.2), others, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_loss_scale_leaves_no_trace():
    for one, other in zip(train(0.2), train(0.2, loss_scale=2.0**12), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_gradients_whose_squares_factor_are_stepped_as_adamw_steps_them():
    """There the product of a row's and a column's second moment is the element's own."""
    torch.manual_seed(0)
    start = torch.randn(40, 24)
    runs = []
    for offloads in (True, False):
        weight = torch.nn.Parameter(start.clone())
        generator = torch.Generator().manual_seed(1)
        config = ZenFlowConfig(
            second_moment="factored", topk_ratio=0.25, min_split_elements=1, select_interval=3
        )
        optimizer = (
            ZenFlowAdamW([weight], lr=1e-2, config=config)
            if offloads
            else torch.optim.AdamW([weight], lr=1e-2)
        )
        rows, columns = (torch.rand(n, generator=generator) + 0.1 for n in (40, 24))
        for _ in range(20):
            signs = torch.randint(0, 2, (40, 24), generator=generator) * 2.0 - 1.0
            weight.grad = signs * rows[:, None] * columns
            optimizer.step()
        if offloads:
            optimizer.eval()
        runs.append(weight.detach().clone())
        if offloads:
            optimizer.close()
    torch.testing.assert_close(*runs, rtol=1e-4, atol=1e-5)


def test_a_state_goes_to_adamw_and_comes_back():
    """AdamW's state has the products, and first moments that are multiplied by their roots."""
    model = GivenGradients([(48, 20)], torch.float32, 0)
    config = ZenFlowConfig(
        second_moment="factored", topk_ratio=0.25, min_split_elements=1, select_interval=0
    )
    with closing(ZenFlowAdamW(model.parameters(), lr=1e-2, config=config)) as optimizer:
        for step in range(1, 9):
            feed(model, optimizer, model.draw_gradients(step, 0, 0.0), "keep")
        optimizer.eval()
        saved = optimizer.to_adamw_state_dict()
        again = GivenGradients([(48, 20)], torch.float32, 0)
        again.load_state_dict(model.state_dict())
    state = saved["state"][0]
    beta2 = 0.999
    quotients = state["exp_avg"] / (state["exp_avg_sq"] / (1 - beta2**8)).sqrt()
    assert 0.05 < float(quotients.abs().mean()) < 1.0
    with closing(ZenFlowAdamW(again.parameters(), lr=1e-2, config=config)) as optimizer:
        optimizer.load_state_dict(saved)
        back = optimizer.to_adamw_state_dict()["state"][0]
    for name in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(back[name], state[name], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(("host_state", "size"), [("float32", 8.0), ("compact", 4 + 1 / 64)])
def test_state_has_no_second_moments(host_state, size):
    model = GivenGradients([(640, 100)], torch.bfloat16, 0)
    taken = {}
    for second in ("factored", "element"):
        config = ZenFlowConfig(
            second_moment=second, host_state=host_state, topk_ratio=0.25, min_split_elements=1
        )
        with closing(ZenFlowAdamW(model.parameters(), config=config)) as optimizer:
            (split,) = optimizer._engine.layout.splits
            taken[second] = sum(tensor.nbytes for tensor in split.host.state.tensors())
            device = {"factored": 8, "element": 12}[second] * 25 * 640
            assert sum(getattr(split.bank, name).nbytes for name in STATE) == device
            plan = optimizer.memory
            taken[f"{second} plan"] = plan.host_bytes
    assert taken["factored"] == size * 640 * 75
    saved = taken["element"] - taken["factored"]
    assert taken["element plan"] - taken["factored plan"] == saved


STATE = ("master", "exp_avg", "exp_avg_sq")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"update_rule": "published"}, "update_rule must be 'exact'"),
        ({"topk_ratio": 1.0}, "topk_ratio must be less than 1"),
        ({"second_moment": "row"}, "second_moment must be one of element, factored"),
    ],
)
def test_settings_without_anything_to_factor_are_refused(changes, said):
    with pytest.raises(ConfigError, match=said):
        ZenFlowConfig(**{"second_moment": "factored", **changes})
