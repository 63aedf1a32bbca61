"""Losses of a batch, and the quality of a model on held-out batches."""

from __future__ import annotations

import torch
from torch.nn import functional

from experiments.output.run_types import Evaluation
from experiments.training.parts.data.batches import IGNORED, Batch
from experiments.training.parts.models.chunked_loss import loss_in_head, output_layer
from experiments.training.parts.setup import RunSetup


def forward(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Return the model's logits for a batch; a mask goes along where there is padding."""
    masks = {} if batch.mask is None else {"attention_mask": batch.mask}
    logits: torch.Tensor = model(input_ids=batch.inputs, **masks).logits
    return logits


def loss_of(setup: RunSetup, batch: Batch, module: torch.nn.Module | None = None) -> torch.Tensor:
    """Return the mean loss of a batch, float32 ().

    Args:
        setup: The run.
        batch: The batch, on the run's device.
        module: Model in what shares it between ranks; None is the model itself.
    """
    model = setup.model if module is None else module
    if not setup.settings.chunked_loss:
        return cross_entropy(forward(model, batch), batch)
    with loss_in_head(output_layer(setup.model, setup.settings.model), batch.targets):
        return forward(model, batch)


def cross_entropy(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the mean loss over the batch's targets, in float32 whatever the model's dtype."""
    flat = logits.float().flatten(0, -2)
    return functional.cross_entropy(flat, batch.targets.flatten(), ignore_index=IGNORED)


@torch.no_grad()
def evaluate(setup: RunSetup) -> Evaluation:
    """Return loss (and accuracy) of the model as it is now, on held-out batches.

    Ranks share each batch, and all get the same figures.
    """
    data, device = setup.data, setup.device
    losses = correct = targets = 0.0
    for index in range(min(setup.settings.eval_batches, data.held_out.per_epoch)):
        batch = data.held_out.batch(index).to(device)
        num_targets = batch.targets.numel()
        if data.task == "classification":
            logits = forward(setup.model, batch)
            loss = cross_entropy(logits, batch)
            correct += (logits.argmax(-1) == batch.targets).sum().item()
        else:
            loss = loss_of(setup, batch)
        losses += loss.item() * num_targets
        targets += num_targets
    of_ranks = setup.ranks.gather([losses, correct, targets]).get()
    losses, correct, targets = (sum(parts) for parts in zip(*of_ranks, strict=True))
    result: Evaluation = {"eval_loss": losses / targets}
    if data.task == "classification":
        result["eval_accuracy"] = correct / targets
    return result
