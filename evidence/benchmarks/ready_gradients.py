"""A backward that computes nothing: it hands every parameter a gradient that was there before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Given(torch.autograd.Function):
    """One link of a chain: passes the loss on and gives a parameter its gradient, ready-made."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, param: Tensor, grad: Tensor) -> Tensor:
        ctx.grad = grad
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad_loss, ctx.grad, None


def loss_of(params: Sequence[nn.Parameter], grads: Sequence[Tensor]) -> Tensor:
    """Return a loss with these gradients, whose backward reaches the last parameter first."""
    loss = torch.zeros((), requires_grad=True)
    for param, grad in zip(params, grads, strict=True):
        loss = Given.apply(loss, param, grad)  # type: ignore[no-untyped-call]
    return loss


def native_loss_of(params: Sequence[nn.Parameter], grads: Sequence[Tensor]) -> Tensor:
    """Return a loss with these gradients, without Python in backward but for hooks.

    A gradient is computed, as a product with 1, so this is for small tensors.
    """
    loss = torch.zeros(())
    for param, grad in zip(params, grads, strict=True):
        loss = loss + (param * grad).sum()
    return loss
