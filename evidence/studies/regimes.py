"""Kinds of training that studies compare rules in, and a run of one as a study's cell.

Nothing has a link, so nothing depends on timing, and runs may share a machine.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from evidence.studies.trained import trained
from experiments.lab.study import Cell, Job, Row
from experiments.training.parts.models.named import find_model
from experiments.training.parts.models.pretrained import (
    load_model,
    load_tokenizer,
    save_model_folder,
)
from experiments.training.settings.training import TrainSettings
from zenflow.errors import ConfigError

BASELINE = "on_device"
SCRATCH, FINE_TUNING, LARGER = "from scratch", "fine-tuning", "from scratch, 10.7M parameters"
_SMOKE_STEPS, _SMOKE_BATCHES = 4, 2
_KEPT = ("eval_loss", "captured_energy", "final_train_loss")


def smoked(settings: TrainSettings, smoke: bool) -> TrainSettings:
    """Return the settings, with few steps and evaluations where a smoke test asks for them."""
    if not smoke:
        return settings
    return replace(settings, model="own:tiny", steps=_SMOKE_STEPS, eval_batches=_SMOKE_BATCHES)


def documentation() -> Path:
    """Return the file with Python's own documentation: English, and not in the default data.

    Raises:
        ConfigError: This Python comes without it.
    """
    spec = importlib.util.find_spec("pydoc_data.topics")
    if spec is None or spec.origin is None:
        raise ConfigError("this Python has no pydoc_data: use one that comes with its help texts")
    return Path(spec.origin)


PRETRAINING = TrainSettings(strategy=BASELINE, steps=2500, lr=2e-3, device_threads=1)
"""Training of the model that fine-tuning goes on from."""


def settings_of(regime: str, *, smoke: bool) -> TrainSettings:
    """Return the settings that all runs of a regime share."""
    common = TrainSettings(device_threads=1, host_threads=1, timeline_steps=0)
    if regime != FINE_TUNING:
        model = "10m" if regime == LARGER else common.model
        return smoked(replace(common, steps=800, model=model), smoke)
    return smoked(replace(common, steps=400, data=str(documentation())), smoke)


def cell_of(
    regime: str, variant: str, training: TrainSettings, *, needs: Sequence[Cell] = ()
) -> Cell:
    """Return the cell of one run; fine-tuning's model is that of the first cell that it needs.

    Args:
        regime: Kind of training.
        variant: Name of the rule.
        training: Settings of the run.
        needs: Cells that must be made before, besides the model that fine-tuning starts from.
    """
    start = (_pretraining(training),) if regime == FINE_TUNING else ()
    return Cell(
        labels={"variant": variant},
        settings={
            "regime": regime,
            "lr": training.lr,
            "seed": training.seed,
            "steps": training.steps,
            "dtype": training.dtype,
            "config": training.config(None).to_dict(),
        },
        needs=(*start, *needs),
        work=training,
    )


def _pretraining(training: TrainSettings) -> Cell:
    own = smoked(PRETRAINING, training.eval_batches == _SMOKE_BATCHES)
    return cell_of("pretraining", "the model of fine-tuning", own)


def train(cell: Cell, job: Job, *, start_noise: float = 0.0, also_kept: Sequence[str] = ()) -> Row:
    """Carry out a cell's run and return its losses.

    Args:
        cell: The run.
        job: Where it is carried out.
        start_noise: Standard deviation of a change of each first weight, over the weight.
        also_kept: Names of further values of the run's summary to return.
    """
    settings: TrainSettings = cell.work
    if cell.settings["regime"] == FINE_TUNING:
        settings = replace(settings, model=str(job.folder_of(cell.needs[0]) / "model"))
    if start_noise:
        start = job.folder / "start"
        if not start.is_dir():
            _save_near(settings, start_noise, start)
        settings = replace(settings, model=str(start))
    summary = trained(settings, job.folder)
    return {name: summary[name] for name in (*_KEPT, *also_kept)}


@torch.no_grad()
def _save_near(settings: TrainSettings, noise: float, folder: Path) -> None:
    """Save the model that a run begins with, each weight w as w (1 + noise n), n of N(0, 1)."""
    found = find_model(settings.model)
    tokenizer = load_tokenizer(found)
    model = load_model(found, settings, tokenizer, num_classes=0)
    generator = torch.Generator().manual_seed(settings.seed)
    for _, param in sorted(model.named_parameters()):
        param.mul_(1.0 + noise * torch.randn(param.shape, generator=generator))
    save_model_folder(model, tokenizer, folder)
