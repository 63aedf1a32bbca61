"""Cross entropy whose logits are never whole: the output layer makes them chunk by chunk.

A vocabulary of 128,256 makes 0.5 GB of float32 logits for 1,024 tokens, and a loss of all of them
holds that several times. Here a chunk's loss and gradients are computed as soon as its logits are
there, and the next chunk's logits take their place (as in Liger-Kernel, arXiv 2410.10989, without
its Triton kernels). No logit waits for backward, and none is computed twice. Only the sum of the
weight's gradient over the chunks is rounded once more for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from experiments.training.parts.data.batches import IGNORED
from sim.models.activations import CHUNK_LOGITS
from sim.models.families import LOGIT_SCALES
from zenflow.errors import ConfigError


def output_layer(model: nn.Module, name: str) -> nn.Linear:
    """Return the layer that makes a language model's logits.

    Args:
        model: The model.
        name: Its name, for messages.

    Raises:
        ConfigError: It has none of a known kind, or changes its logits behind it.
    """
    found = getattr(model, "get_output_embeddings", lambda: getattr(model, "lm_head", None))()
    if not isinstance(found, nn.Linear):
        raise ConfigError(
            f"{name} has no linear output layer, whose loss could come in chunks: leave out "
            "--chunked-loss"
        )
    changing = [key for key in LOGIT_SCALES if getattr(model.config, key, None) not in (None, 1.0)]
    if changing:
        raise ConfigError(
            f"{name} changes its logits behind the output layer ({', '.join(changing)}): leave "
            "out --chunked-loss"
        )
    return found


@contextmanager
def loss_in_head(head: nn.Linear, targets: Tensor) -> Iterator[None]:
    """Let an output layer return the loss in place of its logits.

    Inside the layer its weights are whole, however ranks share the model.

    Args:
        head: The layer.
        targets: Right words of its input's positions, `IGNORED` where none counts.
    """

    def loss(hidden: Tensor) -> Tensor:
        flat = hidden.reshape(-1, hidden.shape[-1])
        found: Tensor = _ChunkedLoss.apply(  # type: ignore[no-untyped-call] # torch's own
            flat, head.weight, head.bias, targets.flatten(), torch.is_grad_enabled()
        )
        return found

    # Of this layer alone.
    head.forward = loss  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del head.forward


def chunk_size(vocabulary: int) -> int:
    """Return the number of tokens of a chunk, whose logits are `CHUNK_LOGITS` at most.

    More chunks would round the gradient of the output layer's weight more often.

    >>> chunk_size(128_256), chunk_size(32_000), chunk_size(256)
    (256, 1024, 131072)
    """
    return 1 << max(0, (CHUNK_LOGITS // vocabulary).bit_length() - 1)


class _ChunkedLoss(torch.autograd.Function):
    """Mean cross entropy over the targets that count, of a linear layer's outputs."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        learns: bool,
    ) -> Tensor:
        """Return the loss, float32 (), and keep its gradients where a backward follows."""
        of_hidden, of_weight, of_bias = (learns and need for need in ctx.needs_input_grad[:3])
        grads = [
            torch.empty_like(hidden_ND) if of_hidden else None,
            torch.zeros_like(weight_VD) if of_weight else None,
            torch.zeros_like(bias_V) if of_bias and bias_V is not None else None,
        ]
        count = (targets_N != IGNORED).sum()
        total = torch.zeros((), dtype=torch.float32, device=hidden_ND.device)
        size = chunk_size(len(weight_VD))
        for first in range(0, len(hidden_ND), size):
            part = slice(first, first + size)
            rows, targets = hidden_ND[part], targets_N[part]
            log_probs = functional.linear(rows, weight_VD, bias_V).float().log_softmax(-1)
            total += functional.nll_loss(log_probs, targets, ignore_index=IGNORED, reduction="sum")
            if any(grad is not None for grad in grads):
                wrong = _gradient(log_probs, targets, count).to(hidden_ND.dtype)
                _add(grads, part, wrong, rows, weight_VD)
        ctx.grads = grads
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients, times the loss's own."""
        grads, ctx.grads = ctx.grads, None
        return (*(None if own is None else own.mul_(grad) for own in grads), None, None)


def _gradient(log_probs: Tensor, targets: Tensor, count: Tensor) -> Tensor:
    """Return the mean loss's gradient by the logits, in the log-probabilities' memory."""
    counts = (targets != IGNORED).unsqueeze(1)
    probs = log_probs.exp_()
    places = targets.clamp_min(0).unsqueeze(1)
    probs.scatter_add_(1, places, -torch.ones_like(places, dtype=probs.dtype))
    return probs.mul_(counts / count)


def _add(
    grads: list[Tensor | None], part: slice, wrong: Tensor, rows: Tensor, weight: Tensor
) -> None:
    """Add a chunk's gradients to those of input, weight and bias."""
    of_hidden, of_weight, of_bias = grads
    if of_hidden is not None:
        torch.mm(wrong, weight, out=of_hidden[part])
    if of_weight is not None:
        of_weight.addmm_(wrong.t(), rows)
    if of_bias is not None:
        of_bias += wrong.sum(0)
