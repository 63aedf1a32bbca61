"""One run: fine-tune under a rule, and test now and then with the true weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean

import torch
from torch import nn

from evidence.studies.late_updates.optimizer import Group, Hypers, LateOptimizer
from evidence.studies.late_updates.rules import Rule
from evidence.studies.learners import Learner, adamw_arguments, groups_of, of_engine, of_torch
from evidence.studies.scores import accuracy
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
    settings: TrainSettings,
    sentences: Sentences,
    variant: Variant,
    progress: Progress,
    *,
    score: Callable[[Sequence[int], Sequence[int]], float] = accuracy,
    tests_per_epoch: int = POINTS_PER_EPOCH,
) -> Row:
    """Make a run.

    Args:
        settings: Protocol, model and seed.
        sentences: Sentences to train and to test on.
        variant: Rule that trains.
        progress: Hears of every step.
        score: Function of predicted and true labels.
        tests_per_epoch: Number of tests in each pass over the sentences.

    Returns:
        ``losses``: training loss of each step. ``points``: lists of step, mean training loss
        since the last point, test loss and score. ``train_loss``, ``test_loss``, ``score``:
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
    every = max(1, per_epoch // tests_per_epoch)
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
                    tested = _test(bench.model, tests, score)
                points.append([step + 1, round(fmean(losses[since:]), _DIGITS), *tested])
            progress((step + 1) / total, f"step {step + 1}")
    _, train_loss, test_loss, last = points[-1]
    return {
        "losses": losses, "points": points, "train_loss": train_loss, "test_loss": test_loss,
        "score": last,
    }  # fmt: skip


@torch.no_grad()
def _test(
    model: nn.Module,
    batches: TestBatches,
    score: Callable[[Sequence[int], Sequence[int]], float],
) -> tuple[float, float]:
    """Return loss and score over the whole test."""
    model.eval()
    losses = 0.0
    predicted: list[int] = []
    labels: list[int] = []
    for items, batch in batches:
        logits = forward(model, batch)
        losses += cross_entropy(logits, batch).item() * len(items)
        predicted += logits.argmax(-1).tolist()
        labels += batch.targets.tolist()
    model.train()
    return round(losses / len(labels), _DIGITS), round(score(predicted, labels), _DIGITS)


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
