"""Settings of a training run, and their rules.

Nothing here imports torch, so that a mistake in a command is found before anything heavy loads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from autotune.online.controllers import untunable
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
from zenflow.config import ZenFlowConfig, raise_violations
from zenflow.presets import PRESET_CHANGES, ZERO_INFINITY

DTYPES = ("float32", "bfloat16", "float16")
GRADIENT_MODES = ("release", "keep")
TASKS = ("auto", "lm", "classification")
PARALLEL = ("fsdp", "ddp")
STREAMS = ("no", "yes", "auto")

PACES = frozenset({"checkpoint", "save_every", "save_minutes", "eval_every"})
"""Settings that say when a run is saved or evaluated. Compact host state is rounded then."""

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

    strategy: str = setting("zenflow", choices=tuple(PRESET_CHANGES))
    """Preset that the knobs start from; zero_infinity streams layers, and needs --state-dir."""
    knobs: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``ZenFlowConfig`` that differ from the preset."""
    model: str = setting("mini")
    """A size (tiny, mini, small, base, 10m, medium, large, 1b), a config.json, a directory, or a
    hub name."""
    data: str | None = setting(None)
    """Text file, TSV of text and label, directory, or Hugging Face data set (name or name:config);
    default: the source of this Python's standard library."""
    eval_data: str | None = setting(None)
    """File or directory to evaluate on; default: a part of --data is held out."""
    task: str = setting("auto", choices=TASKS)
    """auto goes by the data."""
    text_column: str | None = setting(None)
    """Column of a data set that holds the text."""
    label_column: str | None = setting(None)
    """Column of a data set that holds the class."""
    sequence: int = setting(128, rule=at_least(1))
    """Tokens of a sequence; in classification the length at which texts are cut."""
    batch_size: int = setting(3, rule=at_least(1))
    """Sequences of a micro-batch, over all ranks."""
    grad_accum: int = setting(1, rule=at_least(1))
    """Micro-batches of a step."""
    steps: int | None = setting(None, rule=at_least(1))
    """Optimizer steps; by default one epoch of a model with weights, else 800."""
    epochs: float | None = setting(None, rule=POSITIVE)
    """Passes over the data, in place of --steps."""
    lr: float = setting(4e-4, rule=POSITIVE)
    """Learning rate at its peak."""
    betas: tuple[float, float] = setting((0.9, 0.95), rule=_BETAS)
    """AdamW's two decay rates."""
    eps: float = setting(1e-8, rule=POSITIVE)
    """Addend of AdamW's denominator, epsilon."""
    weight_decay: float = setting(0.1, rule=NOT_NEGATIVE)
    """Decoupled decay of matrices; vectors (norms, biases) never decay."""
    schedule: str = setting("cosine", choices=SCHEDULES)
    """Learning rate after the rise, or a schedule of DeepSpeed."""
    schedule_params: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of a schedule of DeepSpeed; those left out follow lr, warmup and steps."""
    warmup: float = setting(0.1, rule=_WARMUP)
    """Share of the steps over which the learning rate rises from 0."""
    max_grad_norm: float | None = setting(1.0, rule=POSITIVE, none="none")
    """Global-norm clip, or none."""
    gradients: str = setting("release", choices=GRADIENT_MODES)
    """When gradients leave: in backward, or step()."""
    dtype: str = setting("float32", choices=DTYPES)
    """Precision of the parameters; by default that of their weights."""
    checkpointing: bool = setting(False)
    """Recompute each layer's activations in backward."""
    chunked_loss: bool = setting(False)
    """Make logits chunk by chunk, never all at once: a large vocabulary's take the most memory."""
    offload_sums: bool = setting(False)
    """Let sums of micro-batches' gradients wait on the host; streamed weights' always do."""
    stream: str = setting("no", choices=STREAMS, bare="yes")
    """Let the layers' weights live on the host and visit the device: for models that don't fit.

    ``auto`` does where weights and optimizer would leave activations little of a GPU's memory."""
    resident_layers: int | None = setting(None, rule=at_least(0), none="auto")
    """Layers that stay on the device under --stream; auto: as many as a GPU has room for."""
    offload_activations: bool = setting(False)
    """Let layers' inputs wait on the host under --stream; of use with --checkpointing."""
    state_dir: str | None = setting(None)
    """Folder on a local drive for the host's states of AdamW, with --topk-ratio 0."""
    drive_tbw: float | None = setting(None, rule=POSITIVE)
    """Terabytes that the maker of --state-dir's drive warrants to be written; tells the wear."""
    grad_scaler: Mapping[str, float] = field(default_factory=dict)
    """Arguments of torch's ``GradScaler``, used with float16."""
    parallel: str | None = setting(None, choices=PARALLEL)
    """Share the run between torchrun's processes: fsdp shards the model, ddp copies it."""
    bind_cores: bool = setting(True)
    """Give each rank cores of its own, near its GPU first."""
    device: str = setting("auto", rule=_DEVICE)
    """auto, cpu or cuda."""
    link: tuple[float, float] | None = setting(None, rule=_LINK, key="link_gbps", unit=1e9)
    """Emulated link of a CPU in GB/s, device to host and back, as in 0.05,0.05.

    The field has bytes/s.
    """
    host_threads: int | None = setting(None, rule=at_least(1))
    """Threads of the host update."""
    device_threads: int | None = setting(None, rule=at_least(1))
    """Threads of torch. None is one for each core; on a CPU one core is left to the host side."""
    seed: int = setting(0, rule=_SEED)
    """Decides the first weights and the data's order."""
    start_steps: int | None = setting(None, rule=OR_NEVER)
    """Steps on the device that --compare goes on from; 0: none.

    A model with weights has no start. None leaves the number to ``for_comparison``.
    """
    memory_check: bool = setting(True)
    """Refuse a run whose optimizer can't fit host or GPU, before any of it is allocated."""
    checkpoint: bool = setting(True)
    """Save what --resume needs, on the way and at the end.

    Model and results are written in any case.
    """
    save_every: int = setting(0, rule=OR_NEVER)
    """Steps between checkpoints; 0: by minutes, and at the end."""
    save_minutes: float = setting(10.0, rule=OR_NEVER)
    """Minutes between checkpoints, or more where saving would take over 5% of the time; 0: by
    steps, and at the end."""
    eval_every: int = setting(0, rule=OR_NEVER)
    """Steps between evaluations; 0: at the end only."""
    eval_batches: int = setting(24, rule=at_least(1))
    """Held-out batches of an evaluation, at most."""
    timeline_steps: int = setting(12, rule=OR_NEVER)
    """Last steps whose spans are recorded."""

    def __post_init__(self) -> None:
        """Check everything that can be checked without data or model."""
        if self.strategy == ZERO_INFINITY:
            object.__setattr__(self, "stream", "yes")
            if self.resident_layers is None:
                object.__setattr__(self, "resident_layers", 0)
        raise_violations("the run", violations(self))
        broken = [*_combination_errors(self), *tuning_errors(self, self.strategy, self.knobs)]
        raise_violations("the run", broken)
        named_schedule(self.schedule, self.schedule_params)
        config = self.config(steps_per_epoch=1)
        if self.controller is not None:
            raise_violations("the run", list(untunable(self.controller, config)))

    def config(self, steps_per_epoch: int | None) -> ZenFlowConfig:
        """Return the engine's configuration for a data set of so many steps."""
        knobs = {"min_split_elements": MIN_SPLIT_ELEMENTS, **self.start_knobs}
        if knobs.get("select_strategy") == "epoch":
            knobs.setdefault("steps_per_epoch", steps_per_epoch)
        return ZenFlowConfig.preset(self.strategy, **knobs)

    @property
    def start_knobs(self) -> dict[str, Any]:
        """Fields of ``ZenFlowConfig`` that differ from the preset when the run begins."""
        # The paper's start: S lengthens as training settles.
        start = {"update_interval": 1} if self.controller == "zen-auto" else {}
        return {**self.knobs, **start}

    @property
    def is_compact(self) -> bool:
        """Whether the host's state is compact, so that its weights depend on `PACES`."""
        return self.knobs.get("host_state") == "compact"

    @property
    def label(self) -> str:
        """Name of the run: its strategy, or the controller that changes it."""
        if self.controller is None:
            return self.strategy
        return "zen-auto" if self.controller == "zen-auto" else "auto"

    def workload(self, model_config: Mapping[str, Any] | None = None) -> Workload:
        """Return the simulator's workload of the model and the batch.

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
            loss="chunks" if self.chunked_loss else "tokens",
            offloads_activations=self.offload_activations,
        )

    def with_strategy(self, name: str) -> TrainSettings:
        """Return the same run under another preset, with the knobs that leave it what it is.

        No controller changes them then.
        """
        allowed = KNOBS_OF_PRESET.get(name)
        knobs = {
            key: value for key, value in self.knobs.items() if allowed is None or key in allowed
        }
        changes: dict[str, Any] = dict.fromkeys(item.name for item in fields(TuningSettings))
        if name == "on_device":  # where all of the model is
            changes |= {"stream": "no", "resident_layers": None, "offload_activations": False}
            changes |= {"offload_sums": False}
        return replace(self, strategy=name, knobs=knobs, **changes)

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
    if settings.dtype == "float16" and settings.chunked_loss:
        yield (
            "float16 parameters need --no-chunked-loss: a chunk's gradients are computed before "
            "they are scaled, and small ones vanish in 16 bits"
        )
    yield from _stream_errors(settings)
    yield from _drive_errors(settings)
    if settings.parallel is None:
        return
    if ":" in settings.device:
        yield (
            f"device {settings.device!r} is one device, and each rank takes its own: leave the "
            "number out"
        )


def _drive_errors(settings: TrainSettings) -> Iterator[str]:
    if settings.state_dir is None:
        if settings.drive_tbw is not None:
            yield "--drive-tbw is of the drive that --state-dir is on: give both, or neither"
        if settings.strategy == ZERO_INFINITY:
            yield "--strategy zero_infinity has its states on a drive: give --state-dir FOLDER"
        return
    if settings.parallel is not None:
        yield "--state-dir is for one process: leave out --parallel"
    if settings.controller is not None:
        yield "--state-dir has no tuner yet, whose simulator knows no drive: leave it out"
    rule = {**PRESET_CHANGES[settings.strategy], **settings.knobs}
    if rule.get("topk_ratio") != 0 or rule.get("update_rule", "exact") != "exact":
        yield "--state-dir needs all columns on the host, and AdamW exactly: give --topk-ratio 0"


def _stream_errors(settings: TrainSettings) -> Iterator[str]:
    if settings.offload_sums and settings.gradients == "keep":
        yield "--offload-sums needs gradients='release', in which sums leave during backward"
    if settings.offload_sums and settings.parallel is not None:
        yield "--offload-sums is for one process: leave out --parallel, or --offload-sums"
    if settings.stream == "no":
        if settings.resident_layers:
            yield "--resident-layers is of streamed models: give --stream too, or leave it out"
        if settings.offload_activations:
            yield "--offload-activations is of streamed models: give --stream too, or leave it out"
        return
    if settings.parallel is not None:
        yield "--stream is for one process: leave out --parallel, which shards the model instead"
    if settings.gradients == "keep":
        yield "--stream needs gradients='release': a full device has no room for all of them"
    if settings.controller is not None:
        yield "--stream has no tuner yet, whose simulator knows no visiting weights: leave it out"
    if settings.strategy == "on_device" or settings.knobs.get("topk_ratio") == 1:
        yield "--stream needs state on the host: take another strategy, or a smaller --topk-ratio"
