"""What a loop runs on: a loss that is linear in the weights, under AdamW and under this optimizer.

Gradients of a linear loss do not depend on the weights. So the weights that AdamW ends with are
known whichever weights the forwards have seen, and this optimizer must end with them: a batch that
is lost, taken twice or taken against its owner's will shows by about a learning rate.
"""

import contextlib
import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tests.models import TINY, closing
from zenflow import ZenFlowAdamW, ZenFlowConfig

SHAPES = ((24, 40), (12,), (16, 30), (), (8, 3, 5), (6, 200))
"""Shapes of the parameters: matrices, a kernel, a bias and a number."""

PRESETS = {
    "on_device": ZenFlowConfig.preset("on_device", **TINY),
    "zero_offload": ZenFlowConfig.preset("zero_offload", **TINY),
    "zenflow": ZenFlowConfig(select_interval=3, block_elements=300, **TINY),
    "delayed": ZenFlowConfig.preset("delayed", **TINY),
    "zenflow_paper": ZenFlowConfig.preset("zenflow_paper", select_interval=4, **TINY),
}
"""Settings of the update rule, by preset."""

TOLERANCES = {torch.float32: 4e-7, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Largest difference of true weights, of a tensor's largest element: rounding alone.

In float32 torch's operations and the host's kernel add up in another order.
"""

ADAMW = {"lr": 1e-2, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.1}
"""Settings of AdamW."""


@functools.cache
def drawn_gradients(index):
    """Return the gradients of a batch, whose numbers every dtype has."""
    generator = torch.Generator("cpu").manual_seed(1000 + index)
    return [torch.randint(-8, 9, s, generator=generator, device="cpu") / 8 for s in SHAPES]


class Linear(nn.Module):
    """Parameters of all shapes, and a loss whose gradients are given numbers.

    Weights and gradients are small multiples of a power of two: their sums, halves and products
    with a loss scale are exact in every dtype.
    """

    def __init__(self, dtype):
        super().__init__()
        generator = torch.Generator("cpu").manual_seed(0)
        drawn = [torch.randint(-8, 9, s, generator=generator, device="cpu") for s in SHAPES]
        self.weights = nn.ParameterList(nn.Parameter((w / 64).to(dtype)) for w in drawn)

    def gradients(self, index):
        """Return the gradients of a batch."""
        return [g.to(p) for g, p in zip(drawn_gradients(index), self.weights, strict=True)]

    def forward(self, index):
        """Return the loss of a batch."""
        pairs = zip(self.weights, self.gradients(index), strict=True)
        return sum((p * g).sum(dtype=torch.float32) for p, g in pairs)


@dataclass
class Run:
    """A model and its optimizer, as a loop has them."""

    model: Linear
    """The model; `model(index)` is the loss of a batch."""
    optimizer: Any
    """torch's AdamW or ZenFlowAdamW."""
    is_ours: bool
    """Whether the optimizer is this project's."""
    notes: dict[str, Any] = field(default_factory=dict)
    """What a loop keeps from one part of it to another."""

    @property
    def params(self):
        """The parameters."""
        return list(self.model.parameters())

    def clip(self, max_norm):
        """Clip as the optimizer wants it: its gradients may have left."""
        if self.is_ours:
            self.optimizer.clip_grad_norm_(max_norm)
        else:
            nn.utils.clip_grad_norm_(self.params, max_norm)

    def true_weights(self):
        """Return a context in which the model has its true weights."""
        return self.optimizer.true_weights() if self.is_ours else contextlib.nullcontext()

    def saved(self):
        """Return a copy of the true weights."""
        with self.true_weights():
            return [p.detach().float().clone() for p in self.params]


def expected(loop, preset, dtype):
    """Return the true weights of a loop under AdamW in float32.

    The published rule is not AdamW: there the loop under this optimizer in keep mode is the
    measure, of which other tests compare single steps with a reference.
    """
    return adamws(loop) if PRESETS[preset].is_exact else ours(loop, preset, dtype, "keep")


@functools.cache
def adamws(loop):
    """Return the weights of a loop under torch's AdamW in float32."""
    model = Linear(torch.float32)
    run = Run(model, torch.optim.AdamW(model.parameters(), **ADAMW), is_ours=False)
    loop.train(run)
    return run.saved()


@functools.cache
def ours(loop, preset, dtype, mode):
    """Return the true weights of a loop under this optimizer."""
    arguments = dict(ADAMW)
    if mode == "release" and loop.accumulation_steps > 1:
        arguments["accumulation_steps"] = loop.accumulation_steps
    model = Linear(dtype)
    with loop.around():
        optimizer = ZenFlowAdamW(
            model.parameters(), config=PRESETS[preset], offload_gradients=mode, **arguments
        )
        with closing(optimizer):
            run = Run(model, optimizer, is_ours=True)
            loop.train(run)
            return run.saved()
