"""Settings of a training run, and their rules.

Nothing here imports torch, so that a mistake in a command is found before anything heavy loads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from experiments.training.settings.comparison import (
    COMPARE_STEPS,
    KNOBS_OF_PRESET,
    START_LR,
    START_SHARE,
    pace_of_evaluations,
)
from experiments.training.settings.field import (
    NOT_NEGATIVE,
    OR_NEVER,
    POSITIVE,
    Rule,
    at_least,
    setting,
    violations,
)
from experiments.training.settings.schedule import SCHEDULES, named_schedule
from experiments.training.settings.sizes import MODEL_SIZES
from experiments.training.settings.tuning import TuningSettings, tuning_errors
from sim.models.workload import Workload
from zenflow.config import PRESETS, ZenFlowConfig, raise_violations

DTYPES = ("float32", "bfloat16", "float16")
GRADIENT_MODES = ("release", "keep")
TASKS = ("auto", "lm", "classification")
PARALLEL = ("fsdp", "ddp")

_DEVICE = Rule(
    "must be auto, cpu or cuda",
    lambda name: re.fullmatch(r"auto|(cpu|cuda)(:\d+)?", name) is not None,
)
_BETAS = Rule("must lie in [0, 1)", lambda betas: all(0 <= beta < 1 for beta in betas))
_WARMUP = Rule("is a share of the steps, in [0, 1]", lambda share: 0 <= share <= 1)
_SEED = Rule("must lie in [0, 2**63)", lambda seed: 0 <= seed < 2**63)
_LINK = Rule(
    "must be two positive rates, in bytes/s", lambda rates: all(map(POSITIVE.holds, rates))
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings(TuningSettings):
    """Everything that decides a run's results and speed; SI units throughout."""

    strategy: str = setting("zenflow", "Preset that the knobs start from.", choices=PRESETS)
    knobs: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``ZenFlowConfig`` that differ from the preset."""
    model: str = setting(
        "mini",
        f"A size ({', '.join(MODEL_SIZES)}), a config.json, a local directory or a hub name.",
    )
    data: str | None = setting(
        None,
        "Text file, TSV of text and label, directory, or Hugging Face data set (name or "
        "name:config); default: the source of this Python's standard library.",
    )
    eval_data: str | None = setting(
        None, "File or directory to evaluate on; default: a part of --data is held out."
    )
    task: str = setting("auto", "auto goes by the data.", choices=TASKS)
    text_column: str | None = setting(None, "Column of a data set that holds the text.")
    label_column: str | None = setting(None, "Column of a data set that holds the class.")
    sequence: int = setting(128, "Tokens of a sequence.", at_least(1))
    """Tokens of a sequence; in classification the length at which texts are cut."""
    batch_size: int = setting(3, "Sequences of a micro-batch, over all ranks.", at_least(1))
    grad_accum: int = setting(1, "Micro-batches of a step.", at_least(1))
    steps: int | None = setting(
        None,
        "Optimizer steps; by default one epoch of a model with weights, else 800.",
        at_least(1),
    )
    """Optimizer steps. With neither this nor ``epochs`` they are ``DEFAULT_STEPS``."""
    epochs: float | None = setting(None, "Passes over the data, in place of --steps.", POSITIVE)
    lr: float = setting(4e-4, "Peak learning rate.", POSITIVE)
    betas: tuple[float, float] = setting((0.9, 0.95), "AdamW's two decay rates.", _BETAS)
    eps: float = setting(1e-8, "AdamW's epsilon.", POSITIVE)
    weight_decay: float = setting(0.1, "Decoupled decay of matrices.", NOT_NEGATIVE)
    """Decoupled decay of matrices; vectors (norms, biases) never decay."""
    schedule: str = setting(
        "cosine", "Learning rate after the rise, or a schedule of DeepSpeed.", choices=SCHEDULES
    )
    schedule_params: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of a schedule of DeepSpeed; those left out follow lr, warmup and steps."""
    warmup: float = setting(0.1, "Share of the steps over which it rises.", _WARMUP)
    """Share of the steps over which the learning rate rises from 0."""
    max_grad_norm: float | None = setting(1.0, "Global-norm clip, or none.", POSITIVE, none="none")
    gradients: str = setting(
        "release", "When gradients leave: in backward, or step().", choices=GRADIENT_MODES
    )
    dtype: str = setting(
        "float32", "Precision of the parameters; by default that of their weights.", choices=DTYPES
    )
    checkpointing: bool = setting(False, "Recompute each layer's activations in backward.")
    grad_scaler: Mapping[str, float] = field(default_factory=dict)
    """Arguments of torch's ``GradScaler``, used with float16."""
    parallel: str | None = setting(
        None,
        "Share the run between torchrun's processes: fsdp shards the model, ddp copies it.",
        choices=PARALLEL,
    )
    bind_cores: bool = setting(True, "Give each rank cores of its own, near its GPU first.")
    device: str = setting("auto", "auto, cpu or cuda.", _DEVICE)
    link: tuple[float, float] | None = setting(
        None, "Emulated link of a CPU in GB/s, as in 0.05,0.05.", _LINK, key="link_gbps", unit=1e9
    )
    """Emulated link of a CPU: bytes/s device to host, and back."""
    host_threads: int | None = setting(None, "Threads of the host update.", at_least(1))
    device_threads: int | None = setting(None, "Threads of torch.", at_least(1))
    """Threads of torch; None leaves one core to the host side when the device is the CPU."""
    seed: int = setting(0, "Decides the first weights and the data's order.", _SEED)
    start_steps: int | None = setting(
        None, "Steps on the device that --compare goes on from; 0: none.", OR_NEVER
    )
    """Steps of a comparison's start, where the model comes without weights.

    None leaves the number to ``for_comparison``.
    """
    checkpoint: bool = setting(True, "Save what --resume needs, on the way and at the end.")
    """Whether anything is saved for resuming. Model and results are written in any case."""
    save_every: int = setting(
        0, "Steps between checkpoints; 0: by minutes, and at the end.", OR_NEVER
    )
    save_minutes: float = setting(
        10.0, "Minutes between checkpoints, or more; 0: by steps, and at the end.", OR_NEVER
    )
    """Minutes between checkpoints; more where saving would take over 5% of the time."""
    eval_every: int = setting(0, "Steps between evaluations; 0: at the end only.", OR_NEVER)
    eval_batches: int = setting(24, "Held-out batches of an evaluation, at most.", at_least(1))
    timeline_steps: int = setting(12, "Last steps whose spans are recorded.", OR_NEVER)

    def __post_init__(self) -> None:
        """Check everything that can be checked without data or model."""
        raise_violations("the run", violations(self))
        broken = [*_combination_errors(self), *tuning_errors(self, self.strategy, self.knobs)]
        raise_violations("the run", broken)
        named_schedule(self.schedule, self.schedule_params)
        self.config(steps_per_epoch=1)

    def config(self, steps_per_epoch: int | None) -> ZenFlowConfig:
        """Return the engine's configuration for a data set of so many steps."""
        knobs = {"min_split_elements": MIN_SPLIT_ELEMENTS, **self.knobs}
        if self.controller == "zen-auto":
            knobs["update_interval"] = 1  # the paper's start: it lengthens as training settles
        if knobs.get("select_strategy") == "epoch":
            knobs.setdefault("steps_per_epoch", steps_per_epoch)
        return ZenFlowConfig.preset(self.strategy, **knobs)

    @property
    def label(self) -> str:
        """What the run is called: its strategy, or the controller that changes it."""
        if self.controller is None:
            return self.strategy
        return "zen-auto" if self.controller == "zen-auto" else "auto"

    def workload(self, model_config: Mapping[str, Any] | None = None) -> Workload:
        """Return what the simulator takes of the model and the batch.

        Args:
            model_config: Of the model; None for one known by its size, which need not be built.

        Raises:
            ConfigError: The simulator does not know the model's family.
        """
        return Workload.of_config(
            f"{self.model} {self.batch_size}x{self.sequence}",
            MODEL_SIZES[self.model].config() if model_config is None else model_config,
            batch_size=self.batch_size,
            sequence=self.sequence,
            accumulation=self.grad_accum,
            dtype=self.dtype,
            checkpointing=self.checkpointing,
        )

    def with_strategy(self, name: str) -> TrainSettings:
        """Return the same run under another preset, with the knobs that leave it what it is.

        No controller changes them then.
        """
        allowed = KNOBS_OF_PRESET.get(name)
        knobs = {
            key: value for key, value in self.knobs.items() if allowed is None or key in allowed
        }
        untuned: dict[str, Any] = dict.fromkeys(item.name for item in fields(TuningSettings))
        return replace(self, strategy=name, knobs=knobs, **untuned)

    def for_comparison(self) -> TrainSettings:
        """Return the settings with what ``--compare`` fills in where nothing was asked for.

        These are its steps, the evaluations of its picture, and a start (see ``START_SHARE``).
        """
        steps = self.steps or COMPARE_STEPS
        start = round(START_SHARE * steps) if self.start_steps is None else self.start_steps
        return replace(
            self,
            steps=steps if self.epochs is None else None,
            start_steps=start,
            eval_every=self.eval_every or pace_of_evaluations(steps, self.timeline_steps),
        )

    def for_start(self) -> TrainSettings:
        """Return the run that makes the weights which a comparison's strategies go on from."""
        return replace(
            self.with_strategy("on_device"),
            steps=self.start_steps,
            epochs=None,
            start_steps=None,
            lr=START_LR,
            schedule="cosine",
            schedule_params={},
            link=None,
            eval_every=0,
            timeline_steps=0,
            seed=(self.seed + 1) % 2**63,  # or the strategies would see its batches again
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain JSON values."""
        return asdict(self) | {
            "knobs": dict(self.knobs),
            "grad_scaler": dict(self.grad_scaler),
            "schedule_params": dict(self.schedule_params),
            "betas": list(self.betas),
            "link": None if self.link is None else list(self.link),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainSettings:
        """Return settings from ``to_dict``'s values, ignoring keys that are not settings."""
        known = {item.name for item in fields(cls)}
        chosen = {key: value for key, value in values.items() if key in known}
        for key in ("betas", "link"):
            if isinstance(chosen.get(key), list):
                chosen[key] = tuple(chosen[key])
        return cls(**chosen)


DEFAULT_STEPS = 800

MIN_SPLIT_ELEMENTS = 1 << 12
"""Where a run does not say: the sizes above would fit below the engine's own floor whole."""


def _combination_errors(settings: TrainSettings) -> Iterator[str]:
    if settings.steps is not None and settings.epochs is not None:
        yield (
            f"steps ({settings.steps}) and epochs ({settings.epochs}) both say when to stop: "
            "give one of them"
        )
    if settings.dtype == "float16" and settings.gradients == "release":
        yield (
            "float16 parameters need gradients='keep': the loss scaler looks at all gradients "
            "before the step, and in release mode they have left by then"
        )
    if settings.parallel is None:
        return
    if ":" in settings.device:
        yield (
            f"device {settings.device!r} is one device, and each rank takes its own: leave the "
            "number out"
        )
