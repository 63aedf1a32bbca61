"""Losses of a batch, and the quality of a model on held-out batches."""

from __future__ import annotations

import torch
from torch.nn import functional

from experiments.output.run_types import Evaluation
from experiments.training.parts.data.batches import IGNORED, Batch
from experiments.training.parts.setup import RunSetup


def forward(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Return the model's logits for a batch; a mask goes along where there is padding."""
    masks = {} if batch.mask is None else {"attention_mask": batch.mask}
    logits: torch.Tensor = model(input_ids=batch.inputs, **masks).logits
    return logits


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
        logits = forward(setup.model, batch)
        num_targets = batch.targets.numel()
        losses += cross_entropy(logits, batch).item() * num_targets
        correct += (logits.argmax(-1) == batch.targets).sum().item()
        targets += num_targets
    of_ranks = setup.ranks.gather([losses, correct, targets]).get()
    losses, correct, targets = (sum(parts) for parts in zip(*of_ranks, strict=True))
    result: Evaluation = {"eval_loss": losses / targets}
    if data.task == "classification":
        result["eval_accuracy"] = correct / targets
    return result
