"""Which mode gradients live in, and what `step()` clips to: two arguments, one each."""

import copy

import pytest
import torch

from tests.models import TinyStack, assert_equal, closing, weights_of
from tests.zenflow.runs import CONFIG, take_steps
from zenflow import ZenFlowAdamW, ZenFlowConfig

ARGUMENTS = [
    ({}, False, None),
    ({"max_grad_norm": 0.1}, False, 0.1),
    ({"offload_gradients": "keep"}, False, None),
    ({"offload_gradients": "keep", "max_grad_norm": 0.1}, False, 0.1),
    ({"offload_gradients": "keep", "max_grad_norm": None}, False, None),
    ({"offload_gradients": "release"}, True, None),
    ({"offload_gradients": "release", "max_grad_norm": 0.1}, True, 0.1),
    ({"offload_gradients": "release", "max_grad_norm": None}, True, None),
]


def run(**settings):
    model = TinyStack(num_layers=4)
    with closing(ZenFlowAdamW(model.parameters(), config=CONFIG, **settings)) as optimizer:
        for step in range(6):
            model.loss(step).backward()
            optimizer.step()
        optimizer.eval()
    return weights_of(model)


@pytest.mark.parametrize(("settings", "releases", "norm"), ARGUMENTS)
def test_one_argument_is_the_mode_and_another_clips(settings, releases, norm):
    model = TinyStack(num_layers=4)
    with closing(ZenFlowAdamW(model.parameters(), config=CONFIG, **settings)) as optimizer:
        assert optimizer.releases_gradients == releases
        model.loss(0).backward()
        is_there = type(model.layers[0].weight.grad) is torch.Tensor
        assert is_there != releases
        optimizer.step()
    expected = run(max_grad_norm=norm)
    assert_equal(run(**settings), expected)
    if norm is not None:
        assert not torch.equal(expected[0], run(max_grad_norm=None)[0])  # it does clip


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"offload_gradients": True}, 'offload_gradients must be "release" or "keep"'),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be a positive number"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm must be a positive number"),
        ({"max_grad_norm": "keep"}, "offload_gradients is the mode"),
        ({"offload_gradients": "keep", "accumulation_steps": 2}, "is for release mode"),
    ],
)
def test_other_values_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        ZenFlowAdamW(TinyStack(num_layers=4).parameters(), **settings)


@pytest.mark.parametrize("idle", [False, True])
def test_a_rate_that_changes_before_the_step_counts_where_no_weight_has_moved(idle):
    """Without a full bucket in backward all fresh steps have the rate of the step, else none."""

    def moved(lr):
        torch.manual_seed(0)
        model = torch.nn.ModuleList(torch.nn.Linear(256, 256, bias=False) for _ in range(2))
        optimizer = ZenFlowAdamW(
            model.parameters(),
            lr=1e-3,
            config=ZenFlowConfig(topk_ratio=0.0, min_split_elements=1, update_interval=4),
            offload_gradients="release",
            accumulation_steps=2,
        )
        before = weights_of(model)
        with closing(optimizer):
            for step in range(2):
                x = torch.randn(4, 256, generator=torch.Generator().manual_seed(step))
                used = model[:1] if step and idle else model
                if not idle and step:
                    break
                sum(layer(x).square().sum() for layer in used).backward()
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()
            return [float((a - b).norm()) for a, b in zip(weights_of(model), before, strict=True)]

    ratios = [a / b for a, b in zip(moved(1e-4), moved(1e-3), strict=True)]
    assert ratios == pytest.approx([1.0, 1.0] if idle else [0.1, 0.1], rel=1e-3)


@pytest.mark.parametrize("mode", ["keep", "release"])
def test_a_norm_that_is_asked_for_between_steps_is_forgotten_by_a_loaded_state(mode):
    first = TinyStack(num_layers=3)
    with closing(ZenFlowAdamW(first.parameters(), config=CONFIG)) as optimizer:
        take_steps(first, optimizer, range(4))
        state, weights = optimizer.state_dict(), copy.deepcopy(first.state_dict())
        state = copy.deepcopy(state)

    def go_on(*, asks):
        model = TinyStack(num_layers=3)
        settings = {"config": CONFIG, "offload_gradients": mode}
        with closing(ZenFlowAdamW(model.parameters(), **settings)) as optimizer:
            if asks:
                optimizer.clip_grad_norm_(float("inf"))
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
            take_steps(model, optimizer, range(4, 8))
            return weights_of(model)

    assert_equal(go_on(asks=True), go_on(asks=False))
