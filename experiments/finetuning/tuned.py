"""``zenflow finetune --auto``: from settings to the trainer's tuner, and from its file back."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.decisions.file import DECISIONS, read_decisions
from experiments.finetuning.settings import FineTuning, OwnSettings
from experiments.training.run.tuned.replay import HARMLESS, refuse_changes, replayed_run
from zenflow.config import ZenFlowConfig
from zenflow.errors import ConfigError

if TYPE_CHECKING:
    import torch

_COMMAND = "zenflow finetune"
_HARMLESS = (HARMLESS - {"eval_every"}) | {"report_to", "push_to_hub", "sample_tokens"}
"""Settings that a replay may change; evaluations decide which weights are the best."""


def trainer_options(settings: FineTuning, model_config: Mapping[str, Any]) -> Any:
    """Return the mixin's argument ``auto``.

    Args:
        settings: Settings of the run.
        model_config: Content of the model's config.json.

    Raises:
        ConfigError: The simulator does not know the model's family.
    """
    # Imported late, as below: settings are read where nothing heavy is loaded.
    from experiments.training.run.tuned.tuning import tuner_options

    run = settings.run
    command = {"command": {"name": _COMMAND, **settings.to_dict()}}
    if run.replay is not None:
        return {"replay": run.replay, **command}
    if run.controller is None:
        return False
    workload = None if run.controller == "zen-auto" else run.workload(model_config)
    return {**tuner_options(run), "workload": workload, **command}


def started(
    settings: FineTuning, model: Any, device: torch.device, checkpoint: Path | None
) -> ZenFlowConfig:
    """Return the configuration that a run starts, or started, from.

    Args:
        settings: Settings of the run.
        model: Model of which shapes alone are looked at.
        device: Device that trains.
        checkpoint: Folder of the checkpoint that the run goes on from; None for a new run.

    Raises:
        ConfigError: No setting keeps the bounds, the simulator does not know the model's family,
            or a decisions file can't be read.
    """
    run, config = settings.run, settings.config
    options = trainer_options(settings, model.config.to_dict())
    if options is False:
        return config
    from autotune.online.tuner import TunedRun
    from experiments.training.run.tuned.tuning import begun, gpu_bytes

    facts = TunedRun(
        config=config,
        workload=lambda: options["workload"],
        total_steps=run.steps or 1,  # which bounds don't ask for
        settings={},
        gpu_bytes=gpu_bytes(device),
        releases=run.gradients == "release",
        seed=run.seed,
    )
    return begun(run, facts, None if checkpoint is None else checkpoint / DECISIONS).config


def replayed_settings(
    path: Path, shared: Mapping[str, Any], own: Mapping[str, Any], others: Collection[str]
) -> FineTuning:
    """Return the settings of the run that a decisions file tells of.

    Args:
        path: The file of a finished run.
        shared: Settings of ``TrainSettings`` that stand on the command line.
        own: Settings of `OwnSettings` that stand there.
        others: Names of other settings that stand there, each of which makes another run.

    Raises:
        ConfigError: The file is damaged, unfinished or of another command, or a change would make
            it another run.
    """
    refuse_changes(path, [name for name in (*shared, *own) if name not in _HARMLESS])
    refuse_changes(path, others)
    saved = read_decisions(path).header.settings.get("command") or {}
    if saved.get("name") != _COMMAND:
        raise ConfigError(
            f"{path} is of no run of {_COMMAND}: repeat it with zenflow train --replay, or in the "
            "trainer that wrote it"
        )
    return FineTuning(
        data=tuple(saved["data"]),
        run=replayed_run(path, saved["run"], shared),
        own=OwnSettings(**{**asdict(OwnSettings(**saved["own"])), **own}),
    )
