"""One run: fine-tune the model under a rule, and look at the held-out loss of true weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import torch
from torch import nn

from evidence.studies.language_model.data import Rows, Texts, rows_of
from evidence.studies.language_model.design import Rule
from evidence.studies.language_model.model import (
    Bytes,
    Tokenizer,
    load_model,
    load_tokenizer,
    tiny_model,
)
from evidence.studies.learners import Learner, adamw_arguments, of_engine, of_torch
from experiments.lab.study import Progress, Row
from experiments.training.parts.data.batches import IGNORED
from experiments.training.parts.setup import DTYPES, choose_device
from experiments.training.run.evaluation import cross_entropy, forward
from experiments.training.settings.rates import schedule_factor
from experiments.training.settings.training import TrainSettings
from zenflow.config import ZenFlowConfig

_DIGITS = 5


@lru_cache(maxsize=1)
def _loaded(path: Path | None) -> tuple[nn.Module, Tokenizer]:
    """Return the model that all runs begin with, and its tokenizer."""
    if path is None:
        return tiny_model(), Bytes()
    return load_model(path), load_tokenizer(path)


def fine_tune(
    settings: TrainSettings,
    texts: Texts,
    task: str,
    rule: Rule,
    path: Path | None,
    progress: Progress,
) -> Row:
    """Make a run.

    Returns:
        ``losses``: training loss of each step. ``before`` and ``held_out``: held-out loss before
        the first step and behind the last one, with true weights. ``seen``: held-out loss of the
        weights that the next forward would have seen.
    """
    device = choose_device(settings)
    start, tokenizer = _loaded(path)
    train, held_out = rows_of(texts, task, tokenizer, settings.sequence)
    model = copy.deepcopy(start).to(device=device, dtype=DTYPES[settings.dtype]).train()
    params = [param for param in model.parameters() if param.requires_grad]
    total, losses = settings.steps or 1, []
    before = _held_out_loss(model, held_out, device)
    with _learner(settings, params, model, rule) as learner:
        for step in range(total):
            batch = train.drawn(settings.seed, step, settings.batch_size).to(device)
            loss = cross_entropy(forward(model, batch), batch)
            model.zero_grad()
            loss.backward()
            learner.step(settings.lr * schedule_factor(settings, total, step))
            losses.append(round(loss.item(), _DIGITS))
            progress((step + 1) / total, f"step {step + 1}")
        with learner.true_weights():
            after = _held_out_loss(model, held_out, device)
        seen = _held_out_loss(model, held_out, device) if rule.kind == "engine" else after
    return {
        "losses": losses, "before": before, "held_out": after, "seen": seen,
        "num_params": sum(param.numel() for param in params), "device": device.type,
    }  # fmt: skip


@torch.no_grad()
def _held_out_loss(model: nn.Module, rows: Rows, device: torch.device) -> float:
    """Return the mean loss over all targets of the held-out rows."""
    total, count = 0.0, 0
    for on_host in rows.each_once():
        batch = on_host.to(device)
        targets = int((batch.targets != IGNORED).sum())
        total += cross_entropy(forward(model, batch), batch).item() * targets
        count += targets
    return round(total / count, _DIGITS)


@contextmanager
def _learner(
    settings: TrainSettings, params: list[nn.Parameter], model: nn.Module, rule: Rule
) -> Iterator[Learner]:
    """Yield a rule's optimizer."""
    most = settings.max_grad_norm
    if rule.kind == "engine":
        config = ZenFlowConfig.preset(settings.strategy, **settings.knobs)
        with of_engine(params, config, settings) as learner:
            yield learner
    elif rule.kind == "adamw":
        yield of_torch([torch.optim.AdamW(**adamw_arguments(params, settings))], params, most)
    elif rule.kind == "adamw8":
        from torchao.optim import AdamW8bit

        yield of_torch([AdamW8bit(**adamw_arguments(params, settings))], params, most)
    else:
        yield of_torch(_muon(settings, params, model), params, most)


def _muon(
    settings: TrainSettings, params: list[nn.Parameter], model: nn.Module
) -> list[torch.optim.Optimizer]:
    """Return Muon for the layers' matrices, and AdamW for embeddings and vectors, at one rate."""
    embedding = model.get_input_embeddings().weight  # type: ignore[operator]
    matrices = [param for param in params if param.ndim == 2 and param is not embedding]
    known = {id(param) for param in matrices}
    others = [param for param in params if id(param) not in known]
    return [
        torch.optim.Muon(
            matrices, lr=settings.lr, weight_decay=settings.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(**adamw_arguments(others, settings)),
    ]  # fmt: skip
