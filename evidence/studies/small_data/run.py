"""One run: fine-tune under a rule, and test now and then with the true weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from statistics import fmean

import torch
from torch import nn

from evidence.studies.late_updates.optimizer import Group, Hypers, LateOptimizer
from evidence.studies.late_updates.rules import Rule
from evidence.studies.learners import Learner, adamw_arguments, groups_of, of_engine, of_torch
from evidence.studies.small_data.design import ADAMW, POINTS_PER_EPOCH, Variant
from evidence.studies.sst2.data import Sentences
from evidence.studies.sst2.run import TestBatches, workbench
from experiments.lab.study import Progress, Row
from experiments.training.run.evaluation import cross_entropy, forward
from experiments.training.settings.rates import schedule_factor
from experiments.training.settings.training import TrainSettings
from zenflow.config import ZenFlowConfig

_DIGITS = 5


def fine_tune(
    settings: TrainSettings, sentences: Sentences, variant: Variant, progress: Progress
) -> Row:
    """Make a run.

    Returns:
        ``losses``: training loss of each step. ``points``: lists of step, mean training loss
        since the last point, test loss and accuracy. ``train_loss``, ``test_loss``, ``accuracy``:
        those of the last point.
    """
    bench = workbench(settings, sentences)
    params = [param for param in bench.model.parameters() if param.requires_grad]
    tests = bench.data.held_out
    assert isinstance(tests, TestBatches)
    losses: list[float] = []
    points: list[list[float]] = []
    per_epoch = bench.data.train.per_epoch
    total = per_epoch * int(settings.epochs or 1)
    every = max(1, per_epoch // POINTS_PER_EPOCH)
    with _learner(settings, params, variant) as learner:
        for step in range(total):
            batch = bench.data.train.batch(step)
            torch.manual_seed(settings.seed * 1_000_003 + step)  # the same dropout under any rule
            loss = cross_entropy(forward(bench.model, batch), batch)
            bench.model.zero_grad()
            loss.backward()
            learner.step(settings.lr * schedule_factor(settings, total, step))
            losses.append(round(loss.item(), _DIGITS))
            if (step + 1) % every == 0 or step + 1 == total:
                since = int(points[-1][0]) if points else 0
                with learner.true_weights():
                    tested = _test(bench.model, tests)
                points.append([step + 1, round(fmean(losses[since:]), _DIGITS), *tested])
            progress((step + 1) / total, f"step {step + 1}")
    _, train_loss, test_loss, accuracy = points[-1]
    return {
        "losses": losses, "points": points, "train_loss": train_loss, "test_loss": test_loss,
        "accuracy": accuracy,
    }  # fmt: skip


@torch.no_grad()
def _test(model: nn.Module, batches: TestBatches) -> tuple[float, float]:
    """Return loss and accuracy over the whole test."""
    model.eval()
    losses = right = count = 0.0
    for items, batch in batches:
        logits = forward(model, batch)
        losses += cross_entropy(logits, batch).item() * len(items)
        right += float((logits.argmax(-1) == batch.targets).sum())
        count += len(items)
    model.train()
    return round(losses / count, _DIGITS), round(right / count, _DIGITS)


@contextmanager
def _learner(
    settings: TrainSettings, params: list[nn.Parameter], variant: Variant
) -> Iterator[Learner]:
    """Yield a variant's optimizer."""
    if variant.name.startswith(ADAMW):
        plain = torch.optim.AdamW(**adamw_arguments(params, settings))
        yield of_torch([plain], params, settings.max_grad_norm)
        return
    config = ZenFlowConfig.preset("zenflow", **{**settings.knobs, **variant.knobs})
    if variant.rule is None:
        with of_engine(params, config, settings) as learner:
            yield learner
        return
    rule = {"fresh": "factored", **variant.rule}
    late = LateOptimizer(
        [Group(params=own, weight_decay=decay) for own, decay in groups_of(params, settings)],
        Rule(name=variant.name, interval=config.update_interval, **rule),
        config,
        Hypers(betas=settings.betas, eps=settings.eps),
    )
    yield Learner(lambda lr: late.step(lr, settings.max_grad_norm), late.true_weights)
