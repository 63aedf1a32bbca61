"""What is held to torch's expectations, and the problems that it has to solve."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tests.models import TINY, relative_difference
from zenflow import ZenFlowConfig

_ZENFLOW = ZenFlowConfig(
    topk_ratio=0.3, update_interval=3, select_interval=4, block_elements=30, **TINY
)
SUBJECTS = {
    "on_device": {"config": ZenFlowConfig.preset("on_device", **TINY)},
    "zenflow": {"config": _ZENFLOW},
    "zero_offload": {"config": ZenFlowConfig.preset("zero_offload", **TINY)},
    "release": {"config": _ZENFLOW, "offload_gradients": "release"},
}
"""Arguments of the optimizer in each configuration."""

LIMITS = ("on_device", "zero_offload")
"""Configurations whose weights are those of torch.optim.AdamW."""

TOLERANCE = 1e-6
"""Largest difference from AdamW's weights, of a tensor's largest element."""


@dataclass(frozen=True)
class Problem:
    """Parameters, what an optimizer is told of them, and a loss to make smaller."""

    tensors: list[nn.Parameter]
    loss: Callable[[], torch.Tensor]
    params: Any = None
    settings: dict[str, Any] = field(default_factory=dict)

    def made_by(self, make):
        """Return the optimizer of this problem."""
        return make(self.tensors if self.params is None else self.params, **self.settings)

    def closure(self, optimizer):
        """Return what `step()` takes: gradients anew, and the loss."""

        def closure():
            optimizer.zero_grad()
            loss = self.loss()
            loss.backward()
            return loss

        return closure

    def weights(self):
        """Return a copy of all parameters that have elements."""
        return [p.detach().clone() for p in self.tensors if p.numel()]


def affine(weight=None, bias=None, *, others=(), params=None, **settings):
    """Return the problem of torch's own tests: |weight @ input + bias|^2."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(10, 5) if weight is None else weight())
    bias = nn.Parameter(torch.randn(10) if bias is None else bias())
    others = [nn.Parameter(other) for other in others]
    given = torch.randn(5)

    def loss():
        known = (weight.float() @ given + bias.float()).square().sum()
        return known + sum(other.float().square().sum() for other in others)

    made = params(weight, bias) if params else None
    return Problem([weight, bias, *others], loss, made, settings)


def convolution():
    """Return a problem whose kernel is in channels-last order, as its gradient will be."""
    torch.manual_seed(0)
    model = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
    images = torch.randn(2, 4, 5, 5).to(memory_format=torch.channels_last)
    return Problem(list(model.parameters()), lambda: model(images).square().sum())


def train(problem, optimizer, num_steps=10, schedules=()):
    """Train, and return the loss before and after."""
    closure = problem.closure(optimizer)
    before = float(problem.loss().detach())
    for _ in range(num_steps):
        loss = closure().detach()
        optimizer.step()
        for schedule in schedules:
            if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
                schedule.step(loss)
            else:
                schedule.step()
    return before, float(problem.loss().detach())


def assert_like_adamw(actual, expected):
    """Compare a limit's weights with AdamW's."""
    assert relative_difference(actual, expected) <= TOLERANCE
