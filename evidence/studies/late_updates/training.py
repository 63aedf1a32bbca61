"""One training under a rule: the project's own model, data, batches, schedule and clipping."""

from __future__ import annotations

from collections.abc import Callable

import torch

from evidence.studies.late_updates.optimizer import Group, Hypers, LateOptimizer
from evidence.studies.late_updates.rules import Rule
from experiments.lab.study import Row
from experiments.training.parts.setup import RunSetup, build_setup
from experiments.training.run.evaluation import cross_entropy, evaluate, forward
from experiments.training.settings.rates import schedule_factor
from experiments.training.settings.training import TrainSettings
from zenflow.errors import ConfigError

Watcher = Callable[[int, RunSetup, LateOptimizer], None]
"""Called after every step with its number."""
_SHOWN_LOSSES = 50
"""Number of last steps whose mean loss is the training loss."""


def make_optimizer(setup: RunSetup, rule: Rule | None) -> LateOptimizer:
    """Return the optimizer of a run: matrices decay, vectors don't."""
    settings = setup.settings
    trainable = [param for param in setup.model.parameters() if param.requires_grad]
    groups = [
        Group(params=[p for p in trainable if p.ndim >= 2], weight_decay=settings.weight_decay),
        Group(params=[p for p in trainable if p.ndim < 2], weight_decay=0.0),
    ]
    hypers = Hypers(betas=settings.betas, eps=settings.eps)
    return LateOptimizer(groups, rule, setup.config, hypers)


def train(
    settings: TrainSettings,
    rule: Rule | None,
    *,
    stop_after: int | None = None,
    watch: Watcher | None = None,
) -> Row:
    """Return losses of a run.

    Args:
        settings: What is trained, on what, and how long.
        rule: Rule of the deferred columns; None is AdamW everywhere.
        stop_after: Steps after which the run is left, its schedule unchanged; None for all.
        watch: Called after every step.

    Raises:
        ConfigError: The run diverged.
    """
    setup = build_setup(settings)
    optimizer = make_optimizer(setup, rule)
    torch.manual_seed(settings.seed)
    losses = []
    for step in range(min(setup.total_steps, stop_after or setup.total_steps)):
        batch = setup.data.train.batch(step)
        loss = cross_entropy(forward(setup.model, batch), batch)
        setup.model.zero_grad()
        loss.backward()
        lr = settings.lr * schedule_factor(settings, setup.total_steps, step)
        optimizer.step(lr, settings.max_grad_norm)
        losses.append(loss.item())
        if watch is not None:
            watch(step + 1, setup, optimizer)
    if not torch.isfinite(torch.tensor(losses[-1])):
        raise ConfigError(f"the loss is not finite after {len(losses)} steps: lower the rate")
    setup.model.eval()
    with optimizer.true_weights():
        found = evaluate(setup)
    tail = losses[-_SHOWN_LOSSES:]
    return {"eval_loss": found["eval_loss"], "train_loss": sum(tail) / len(tail)}
