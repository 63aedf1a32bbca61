"""Which mode gradients live in, and what `step()` clips to: two arguments, one each."""

import pytest
import torch

from tests.models import TinyStack, assert_equal, closing, weights_of
from tests.zenflow.runs import CONFIG
from zenflow import ZenFlowAdamW

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
