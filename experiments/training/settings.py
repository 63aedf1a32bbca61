"""What a training run is: its settings, their rules, and the model sizes known by name.

Nothing here imports torch, so that a mistake in a command is found before anything heavy loads.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from experiments.training.setting_types import typed
from experiments.training.tuning_rules import BOUNDS, MACHINE, tuning_errors
from zenflow.config import PRESETS, ZenFlowConfig, raise_violations

SCHEDULES = ("constant", "linear", "cosine")
DTYPES = ("float32", "bfloat16", "float16")
GRADIENT_MODES = ("release", "keep")
TASKS = ("auto", "lm", "classification")
_DEVICE = re.compile(r"auto|(cpu|cuda)(:\d+)?")

COMPARED = ("on_device", "zero_offload", "zenflow_paper", "zenflow")
"""The strategies of ``--compare``, in the order of the table."""

_BLOCK_KNOBS = ("min_split_elements", "block_elements")
_PUBLISHED_KNOBS = (
    *_BLOCK_KNOBS,
    "topk_ratio",
    "update_interval",
    "select_strategy",
    "select_interval",
    "full_warm_up_rounds",
    "importance_decay",
    "hysteresis",
)
KNOBS_OF_PRESET: Mapping[str, tuple[str, ...]] = {
    "on_device": (),
    "zero_offload": _BLOCK_KNOBS,
    "zenflow_paper": _PUBLISHED_KNOBS,
}
"""Knobs a comparison hands on to a baseline: those that don't turn it into another strategy.
A preset that is not listed takes every knob."""


NUM_BYTE_TOKENS = 258
"""Bytes, a separator, padding: the vocabulary of models made from scratch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """The shape of a Llama-style decoder."""

    hidden: int
    """Width of the residual stream."""
    layers: int
    heads: int
    ffn: int
    """Width of the gated feed-forward layer."""
    tied: bool = True
    """Whether the output layer shares the embedding's storage."""

    def config(self) -> dict[str, Any]:
        """Return what decides shapes under transformers' names, over the byte vocabulary."""
        return {
            "model_type": "llama",
            "vocab_size": NUM_BYTE_TOKENS,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "intermediate_size": self.ffn,
            "tie_word_embeddings": self.tied,
        }


MODEL_SIZES: Mapping[str, ModelSize] = {
    "tiny": ModelSize(hidden=64, layers=2, heads=4, ffn=176),
    "mini": ModelSize(hidden=128, layers=4, heads=4, ffn=352),
    "small": ModelSize(hidden=192, layers=4, heads=6, ffn=512),
    "base": ModelSize(hidden=256, layers=6, heads=8, ffn=704),
    "medium": ModelSize(hidden=512, layers=8, heads=8, ffn=1408),
    "large": ModelSize(hidden=768, layers=12, heads=12, ffn=2048, tied=False),
    "1b": ModelSize(hidden=2048, layers=20, heads=16, ffn=5632, tied=False),
}
"""Sizes with the byte vocabulary: 0.1M, 0.8M, 1.8M, 4.9M, 26M, 85M and 1.0B parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """Everything that decides a run's results and speed; SI units throughout."""

    strategy: str = "zenflow"
    """The preset that the knobs start from."""
    knobs: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``ZenFlowConfig`` that differ from the preset."""
    model: str = "mini"
    """A size's name, a config.json, a local directory or a hub name."""
    data: str | None = None
    """A text file, a TSV, a directory or a dataset's name; None is this Python's own source."""
    eval_data: str | None = None
    """A file or directory to evaluate on; None holds out a part of the data."""
    task: str = "auto"
    text_column: str | None = None
    label_column: str | None = None
    """Columns of a hub dataset, where the usual names don't fit."""
    sequence: int = 128
    """Tokens of a sequence; in classification the length at which texts are cut."""
    batch_size: int = 3
    """Sequences of a micro-batch."""
    grad_accum: int = 1
    """Micro-batches of a step."""
    steps: int | None = None
    epochs: float | None = None
    """One of the two may be given; with neither, ``DEFAULT_STEPS``."""
    lr: float = 4e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    """Decoupled decay of matrices; vectors (norms, biases) never decay."""
    schedule: str = "cosine"
    warmup: float = 0.1
    """Share of the steps over which the learning rate rises from 0."""
    max_grad_norm: float | None = 1.0
    """Global-norm clip; None is none."""
    gradients: str = "release"
    """``release``: gradients leave during backward; ``keep``: they stay until ``step()``."""
    dtype: str = "float32"
    """The parameters' precision."""
    checkpointing: bool = False
    """Whether backward recomputes each layer's activations, which are then not kept."""
    grad_scaler: Mapping[str, float] = field(default_factory=dict)
    """Arguments of torch's ``GradScaler``, used with float16."""
    device: str = "auto"
    link: tuple[float, float] | None = None
    """Emulated link, bytes/s device to host and back; None is none. Only on a CPU."""
    host_threads: int | None = None
    device_threads: int | None = None
    """Threads of torch; None leaves one core to the host side when the device is the CPU."""
    seed: int = 0
    start_steps: int | None = None
    """Steps on the device from which a comparison's strategies go on, where the model comes
    without weights; None leaves the number to ``for_comparison``."""
    save_every: int = 0
    """Steps between checkpoints; 0 counts minutes only."""
    save_minutes: float = 10.0
    """Minutes between checkpoints, beside those by steps; more where saving would take over 5% of
    the time. 0 counts steps only."""
    eval_every: int = 0
    """Steps between evaluations; 0 evaluates at the end only."""
    eval_batches: int = 24
    timeline_steps: int = 12
    """The last steps whose spans are recorded."""
    controller: str | None = None
    """Who chooses knobs while the run goes on, see ``tuning_rules``; None keeps them."""
    device_memory: float | None = None
    host_memory: float | None = None
    """Most bytes of one device, and of the host, that a tuned run may need; None is no bound."""
    largest_staleness: int | None = None
    """Most steps between a gradient and its landing in a tuned run."""
    smallest_captured: float | None = None
    """Least share of gradient energy in a tuned run's important columns."""
    profile: str | None = None
    """File of ``zenflow calibrate`` that the twin starts from."""
    hardware: str | None = None
    """Machine of the simulator's table that it starts from; with neither, measurements alone."""
    replay: str | None = None
    """Decisions file of the tuned run that this one repeats."""

    def __post_init__(self) -> None:
        """Check everything that can be checked without data or model."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        raise_violations("the run", typed(TrainSettings, values)[1])
        broken = [*_choice_errors(self), *_range_errors(self), *_combination_errors(self)]
        broken += tuning_errors(self)
        raise_violations("the run", broken)
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

    def with_strategy(self, name: str) -> TrainSettings:
        """Return the same run under another preset, with the knobs that leave it what it is.

        No controller changes them then.
        """
        allowed = KNOBS_OF_PRESET.get(name)
        knobs = {
            key: value for key, value in self.knobs.items() if allowed is None or key in allowed
        }
        untuned = dict.fromkeys(("controller", "replay", *BOUNDS, *MACHINE))
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
            eval_every=self.eval_every or max(1, steps // 8),
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

COMPARE_STEPS = 500

START_SHARE = 0.6
"""Steps of a comparison's start as a share of its own.

Offloaded training is fine-tuning: a model with random weights is trained a little first, on the
device and once, and all strategies go on from there.
"""

START_LR = 2e-3
"""Peak learning rate of that start: what a small model learns fast with."""


def _choice_errors(settings: TrainSettings) -> list[str]:
    choices = {
        "strategy": PRESETS,
        "schedule": SCHEDULES,
        "dtype": DTYPES,
        "gradients": GRADIENT_MODES,
        "task": TASKS,
    }
    broken = [
        f"{name} must be one of {', '.join(allowed)}, but is {getattr(settings, name)!r}"
        for name, allowed in choices.items()
        if getattr(settings, name) not in allowed
    ]
    if not _DEVICE.fullmatch(settings.device):
        broken.append(f"device must be auto, cpu or cuda, but is {settings.device!r}")
    return broken


def _range_errors(settings: TrainSettings) -> list[str]:
    at_least_one = (
        "sequence", "batch_size", "grad_accum", "steps", "host_threads", "device_threads",
        "eval_batches",
    )  # fmt: skip
    broken = [
        f"{name} must be at least 1, but is {value}"
        for name in at_least_one
        if (value := getattr(settings, name)) is not None and value < 1
    ]
    broken += [
        f"{name} must be 0 (never) or more, but is {value}"
        for name in ("save_every", "eval_every", "timeline_steps", "start_steps")
        if (value := getattr(settings, name)) is not None and value < 0
    ]
    if not 0 <= settings.seed < 2**63:
        broken.append(f"seed must lie in [0, 2**63), but is {settings.seed}")
    if not (math.isfinite(settings.save_minutes) and settings.save_minutes >= 0):
        broken.append(f"save_minutes must be 0 (never) or more, but is {settings.save_minutes}")
    for name in ("lr", "eps", "epochs", "max_grad_norm"):
        value = getattr(settings, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            broken.append(f"{name} must be a positive number, but is {value}")
    if not (math.isfinite(settings.weight_decay) and settings.weight_decay >= 0):
        broken.append(f"weight_decay must be 0 or more, but is {settings.weight_decay}")
    if not all(0 <= beta < 1 for beta in settings.betas):
        broken.append(f"betas must lie in [0, 1), but are {settings.betas}")
    if not 0 <= settings.warmup <= 1:
        broken.append(f"warmup is a share of the steps, in [0, 1], but is {settings.warmup}")
    return broken


def _combination_errors(settings: TrainSettings) -> list[str]:
    broken = []
    if settings.steps is not None and settings.epochs is not None:
        broken.append(
            f"steps ({settings.steps}) and epochs ({settings.epochs}) both say when to stop: "
            "give one of them"
        )
    if settings.link is not None and not all(
        math.isfinite(rate) and rate > 0 for rate in settings.link
    ):
        broken.append(f"the link's two rates must be positive bytes/s, but are {settings.link}")
    if settings.dtype == "float16" and settings.gradients == "release":
        broken.append(
            "float16 parameters need gradients='keep': the loss scaler looks at all gradients "
            "before the step, and in release mode they have left by then"
        )
    return broken
