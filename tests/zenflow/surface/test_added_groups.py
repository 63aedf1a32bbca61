"""Parameter groups that are added in mid-run, as gradual unfreezing does."""

import copy

import pytest
import torch
from torch import nn

from tests.models import TinyStack, assert_equal, closing, weights_of
from tests.zenflow.runs import CONFIG, MODES
from zenflow import GradientError, ZenFlowAdamW, ZenFlowConfig

both_modes = pytest.mark.parametrize("mode", MODES)


class Unfreezing:
    """A run whose last layer begins frozen and is added later."""

    def __init__(self, make, seed=0):
        self.model = TinyStack(num_layers=4, seed=seed)
        self.head = self.model.layers[-1].requires_grad_(False)
        body = [p for layer in self.model.layers[:-1] for p in layer.parameters()]
        self.optimizer = make(body)

    def unfreeze(self):
        self.head.requires_grad_(True)
        self.optimizer.add_param_group({"params": list(self.head.parameters()), "lr": 3e-3})

    def steps(self, steps):
        for step in steps:
            self.model.loss(step).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return weights_of(self.model)


def zenflow(mode, config=CONFIG):
    return lambda params: ZenFlowAdamW(
        params, lr=1e-2, config=config, offload_gradients=mode, max_grad_norm=0.5
    )


@both_modes
def test_an_added_group_is_trained_as_by_adamw(mode):
    runs = [
        Unfreezing(lambda params: torch.optim.AdamW(params, lr=1e-2)),
        Unfreezing(lambda params: ZenFlowAdamW(
            params, lr=1e-2, config=ZenFlowConfig.preset("on_device"), offload_gradients=mode)),
    ]  # fmt: skip
    results = []
    for run in runs:
        run.steps(range(3))
        run.unfreeze()
        results.append(run.steps(range(3, 8)))
    runs[1].optimizer.close()
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


@both_modes
def test_a_run_with_an_added_group_resumes_bit_for_bit(mode):
    whole = Unfreezing(zenflow(mode))
    with closing(whole.optimizer):
        whole.steps(range(3))
        before = whole.optimizer.memory
        whole.unfreeze()
        added = sum(p.numel() for p in whole.head.parameters())
        assert whole.optimizer.memory.num_params == before.num_params + added
        assert whole.optimizer.memory.split_params == before.split_params
        whole.steps(range(3, 6))
        saved = copy.deepcopy([whole.model.state_dict(), whole.optimizer.state_dict()])
        expected = whole.steps(range(6, 10))
    again = Unfreezing(zenflow(mode), seed=8)
    with closing(again.optimizer):
        again.unfreeze()
        again.model.load_state_dict(saved[0])
        again.optimizer.load_state_dict(saved[1])
        assert_equal(again.steps(range(6, 10)), expected)


@both_modes
def test_a_group_that_cannot_be_added_leaves_the_optimizer_as_it_was(mode):
    expected = Unfreezing(zenflow(mode))
    run = Unfreezing(zenflow(mode))
    bad = {
        "float64": ({"params": [nn.Parameter(torch.zeros(3, dtype=torch.float64))]}, ValueError),
        "lr": ({"params": [nn.Parameter(torch.zeros(3))], "lr": -1.0}, ValueError),
        "more than one": ({"params": [run.model.layers[0].weight]}, ValueError),
        "is on meta": ({"params": [nn.Parameter(torch.zeros(3, device="meta"))]}, ValueError),
    }
    with closing(run.optimizer), closing(expected.optimizer):
        run.steps(range(3))
        for words, (group, error) in bad.items():
            with pytest.raises(error, match=words):
                run.optimizer.add_param_group(group)
        assert len(run.optimizer.param_groups) == 1
        expected.steps(range(3))
        assert_equal(run.steps(range(3, 6)), expected.steps(range(3, 6)))


def test_added_gradients_are_released_too():
    run = Unfreezing(zenflow("release"))
    with closing(run.optimizer):
        run.steps(range(2))
        run.unfreeze()
        run.model.loss(2).backward()
        with pytest.raises(GradientError):
            run.head.weight.grad.norm()
        run.optimizer.step()


def test_no_group_is_added_between_backward_and_step():
    run = Unfreezing(zenflow("release"))
    with closing(run.optimizer):
        run.model.loss(0).backward()
        with pytest.raises(GradientError, match=r"add_param_group\(\) between backward and step"):
            run.unfreeze()
        run.optimizer.step()
