"""Tensors of a real training, as the host has them: AdamW's, some steps after a start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from experiments.training.parts.setup import build_setup
from experiments.training.run.evaluation import cross_entropy, forward
from experiments.training.settings.training import TrainSettings

KINDS = ("gradient", "first moment", "second moment", "weight")
PLACES = ("embedding", "attention", "feed-forward")
MOST_ELEMENTS = 1 << 21
"""Largest number of elements of a tensor that are looked at: whole columns, evenly spaced."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Some columns of one matrix as rows, and of what AdamW keeps of it: float32 (R, O)."""

    tensors: Mapping[str, Tensor]
    """Gradient, moments and weights of the columns, by their names in `KINDS`."""
    step: int
    """Number of steps that the moments have seen."""


def samples(settings: TrainSettings) -> dict[str, Sample]:
    """Train by torch's AdamW, and return a sample of each place in the model."""
    setup = build_setup(settings)
    model = setup.model.float().train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.lr, betas=settings.betas, eps=settings.eps,
        weight_decay=settings.weight_decay,
    )  # fmt: skip
    for step in range(setup.total_steps):
        optimizer.zero_grad()
        batch = setup.data.train.batch(step)
        cross_entropy(forward(model, batch), batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    found = {}
    for place, parameter in _chosen(model).items():
        state = optimizer.state[parameter]
        whole = dict(
            zip(KINDS, (parameter.grad, state["exp_avg"], state["exp_avg_sq"], parameter.detach()),
                strict=True)
        )  # fmt: skip
        found[place] = Sample({kind: _columns(t) for kind, t in whole.items()}, setup.total_steps)
    return found


def _chosen(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the embedding, and matrices of the layer in the middle."""
    matrices = {name: p for name, p in model.named_parameters() if p.ndim == 2}
    inner = [name for name in matrices if any(part.isdigit() for part in name.split("."))]
    layers = sorted({int(part) for name in inner for part in name.split(".") if part.isdigit()})
    middle = str(layers[len(layers) // 2])
    own = [matrices[name] for name in inner if middle in name.split(".")]
    outside = [p for name, p in matrices.items() if name not in inner]
    return dict(zip(PLACES, (outside[0], own[0], own[-1]), strict=True))


def _columns(matrix: Tensor) -> Tensor:
    """Return evenly spaced columns of a matrix as rows, (R, O)."""
    count = max(1, min(matrix.shape[1], MOST_ELEMENTS // matrix.shape[0]))
    chosen = torch.arange(count) * matrix.shape[1] // count
    return matrix.detach().t()[chosen].contiguous()
