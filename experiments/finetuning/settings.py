"""Settings of a fine-tuning: those that it shares with ``TrainSettings``, and its own.

Nothing here imports torch, so that a mistake in a command is found before anything heavy loads.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from experiments.training.parts.models.fine_tuning import FINE_TUNING, train_defaults
from experiments.training.settings.field import Rule, at_least, setting, violations
from experiments.training.settings.paths import located, missing_path
from experiments.training.settings.schedule import OWN_SCHEDULES
from experiments.training.settings.training import TrainSettings
from zenflow.config import ZenFlowConfig, raise_violations
from zenflow.errors import ConfigError

SHARED = frozenset(
    {
        "strategy", "eval_data", "sequence", "batch_size", "grad_accum", "steps", "epochs", "lr",
        "betas", "eps", "weight_decay", "schedule", "warmup", "max_grad_norm", "gradients",
        "dtype", "checkpointing", "offload_sums", "stream", "resident_layers",
        "offload_activations", "state_dir", "drive_tbw", "device", "host_threads",
        "device_threads", "seed", "memory_check", "checkpoint", "save_every", "save_minutes",
        "eval_every",
    }
)  # fmt: skip
"""Settings of ``zenflow train`` that mean the same here."""
DEFAULTS: Mapping[str, Any] = {
    **FINE_TUNING,
    "sequence": 1024,
    "batch_size": 4,
    "checkpointing": True,
}
"""Values of shared settings where nobody says one: what is usual for fine-tuning with TRL."""
TRACKERS: Mapping[str, str] = {"tensorboard": "tensorboard", "wandb": "wandb"}
"""Trackers by the packages that they need."""
_PACKAGES = ("torch", "transformers", "datasets", "accelerate", "trl")
_SHARE = Rule("is a share of the rows, in [0, 1)", lambda share: 0 <= share < 1)
_TRACKERS = Rule(
    f"must be of {', '.join(TRACKERS)}, with commas between them",
    lambda text: set(text.split(",")) <= set(TRACKERS),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSettings:
    """Settings that `zenflow finetune` has and `zenflow train` has not."""

    eval_share: float = setting(0.05, rule=_SHARE)
    """Share of the rows that is held out for evaluation, of 20 rows or more and 200 at most, where
    the data has no part for that; 0: none."""
    chat_template: str | None = setting(None)
    """Jinja file with a chat template, in place of the tokenizer's own."""
    mask_prompts: bool = setting(True)
    """Learn the answers alone; without it, prompts are learnt too."""
    packing: bool | None = setting(None)
    """Put several rows into a sequence, where none sees another; default: for plain text."""
    keep_best: bool = setting(False)
    """Save at every evaluation, and end with the weights of the lowest held-out loss."""
    patience: int | None = setting(None, rule=at_least(1))
    """Evaluations in a row without a lower held-out loss that end the run, with the best weights.
    """
    sample_tokens: int = setting(64, rule=at_least(0))
    """Longest answer that each evaluation prints as a sample, in tokens; 0: none."""
    report_to: str | None = setting(None, rule=_TRACKERS)
    """Trackers that get the log: tensorboard, wandb."""
    push_to_hub: str | None = setting(None)
    """Name on the Hugging Face hub to which the model is pushed in the end, as in me/my-model."""

    @property
    def wants_best(self) -> bool:
        """Whether the run ends with the weights of its best evaluation."""
        return self.keep_best or self.patience is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class FineTuning:
    """All settings of a fine-tuning. See `settle`."""

    data: tuple[str, ...]
    """Files, folders and names of data sets to train on."""
    run: TrainSettings
    """Shared settings; their defaults are `DEFAULTS`."""
    own: OwnSettings
    """Settings of this command alone."""

    def __post_init__(self) -> None:
        """Check everything that can be checked without data or model."""
        raise_violations("the run", violations(self.own))
        raise_violations("the run", list(_broken(self)))

    @property
    def config(self) -> ZenFlowConfig:
        """The engine's configuration, with the engine's own defaults."""
        return ZenFlowConfig.preset(self.run.strategy, **self.run.start_knobs)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain JSON values."""
        return {
            "data": list(self.data),
            "run": self.run.to_dict(),
            "own": asdict(self.own),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> FineTuning:
        """Return settings from `to_dict`'s values.

        Raises:
            ConfigError: They break a rule.
        """
        return cls(
            data=tuple(values["data"]),
            run=TrainSettings.from_dict(values["run"]),
            own=OwnSettings(**values["own"]),
        )


def settle(
    model: str,
    data: tuple[str, ...],
    shared: Mapping[str, Any],
    knobs: Mapping[str, Any],
    own: Mapping[str, Any],
) -> FineTuning:
    """Return all settings of a run, with the defaults where nothing is said.

    Args:
        model: Folder or hub name, with weights.
        data: Files, folders and names of data sets.
        shared: Settings of ``TrainSettings`` that are given, those of a tuned run included.
        knobs: Settings of the update rule that are given.
        own: Settings of `OwnSettings` that are given.

    Raises:
        ConfigError: A rule is broken.
    """
    defaults = {name: value for name, value in DEFAULTS.items() if name not in shared}
    if "steps" in shared:
        defaults.pop("epochs", None)
    values = located({**defaults, **shared, "model": model})
    if knobs.get("select_strategy") == "epoch":
        raise ConfigError(
            "--select-strategy epoch needs the number of steps in an epoch, which packing decides "
            "late: leave it out, and give --select-interval in steps"
        )
    if values.get("dtype") == "float16":
        raise ConfigError("--dtype float16 would need a loss scaler: take bfloat16")
    # The logits of TRL's trainer are never whole: the loss is taken from the output layer's input.
    run = TrainSettings(**values, knobs=dict(knobs), chunked_loss=True)
    told = {**own, "chat_template": _absolute(own.get("chat_template"))}
    where = tuple(located({"data": name})["data"] for name in data)
    return FineTuning(data=where, run=run, own=OwnSettings(**told))


def with_dtype(settings: FineTuning, given: Mapping[str, Any]) -> FineTuning:
    """Return the settings with the precision of the model's weights, where none is given.

    Raises:
        ConfigError: The hub does not give the model's configuration.
    """
    found = train_defaults(settings.run.model, given).get("dtype")
    return settings if found is None else replace(settings, run=replace(settings.run, dtype=found))


def check_packages(settings: OwnSettings) -> None:
    """Refuse to begin without the packages that a run needs; none is loaded.

    Raises:
        ConfigError: One is not installed.
    """
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"zenflow finetune needs {', '.join(missing)}: pip install 'zenflow-offload[finetune]'"
        )
    for name in (settings.report_to or "").split(","):
        if name and importlib.util.find_spec(TRACKERS[name]) is None:
            raise ConfigError(
                f"--report-to {name} needs a package that is not installed: pip install "
                f"{TRACKERS[name]}, or leave it out"
            )


def _absolute(path: str | None) -> str | None:
    if path is None:
        return None
    if not Path(path).expanduser().is_file():
        raise missing_path(path, "--chat-template")
    return str(Path(path).expanduser().resolve())


def _broken(settings: FineTuning) -> Iterator[str]:
    run, own = settings.run, settings.own
    if run.schedule not in OWN_SCHEDULES:
        yield f"--schedule must be one of {', '.join(OWN_SCHEDULES)} here, but is {run.schedule}"
    if ":" in run.device:
        yield (
            f"--device {run.device} is one of several: choose it with CUDA_VISIBLE_DEVICES, and "
            "leave the number out"
        )
    if run.warmup == 1:
        yield "--warmup must be less than 1: the learning rate would never fall"
    if not own.wants_best:
        return
    why = "--patience" if own.patience is not None else "--keep-best"
    if not run.eval_every:
        yield f"{why} goes by evaluations on the way: give --eval-every STEPS"
    elif run.save_every:
        yield f"{why} saves where it evaluates: leave --save-every {run.save_every} out"
    if not run.checkpoint:
        yield f"{why} ends with the weights of a checkpoint: leave --no-checkpoint out"
    if not own.eval_share and run.eval_data is None:
        yield f"{why} needs held-out rows: give --eval-data, or an --eval-share above 0"
