"""DeepSpeedSettings, and the functions that make them from a DeepSpeed JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from zenflow.checks import is_number
from zenflow.config import ZenFlowConfig
from zenflow.deepspeed.reading import Reading
from zenflow.deepspeed.rule import read_rule
from zenflow.deepspeed.schedule import DeepSpeedSchedule, read_schedule
from zenflow.errors import ConfigError

Dtype = Literal["fp32", "bf16", "fp16"]

_BATCH_KEYS = (
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "train_batch_size",
)
# Defaults are DeepSpeed's.
_LOSS_SCALE = {"loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000}
# DeepSpeed's Adam decays weights as AdamW does unless it is told not to.
_ADAMW_FLAGS = {"adam_w_mode": True, "bias_correction": True, "amsgrad": False}
_DEEPSPEED_ADAM: dict[str, Any] = {
    "lr": 1e-3,
    "betas": [0.9, 0.999],
    "eps": 1e-8,
    "weight_decay": 0.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedSettings:
    """Settings in a DeepSpeed JSON that this project can follow."""

    config: ZenFlowConfig
    """Configuration of the update rule."""

    optimizer: Mapping[str, Any]
    """``lr``, ``betas``, ``eps``, ``weight_decay`` for ``ZenFlowAdamW``.

    DeepSpeed's defaults stand for keys that ``optimizer.params`` lacks (its weight decay is 0);
    keys that are "auto" are absent, and so are all where the file has no optimizer.
    """

    schedule: DeepSpeedSchedule | None
    """Schedule for ``zenflow.deepspeed_lr_scheduler``; None is a constant learning rate."""

    max_grad_norm: float | None
    """Largest norm over all gradients; None is no clipping (or "auto", see ``auto``)."""

    train_micro_batch_size_per_gpu: int | None
    """Samples in a forward pass; None where the file doesn't say."""

    gradient_accumulation_steps: int | None
    """Backward passes in an optimizer step. (DeepSpeed's ZenFlow replaces it by S; we don't.)"""

    train_batch_size: int | None
    """Samples in an optimizer step, over all devices; None where the file doesn't say."""

    dtype: Dtype | None
    """Dtype of the model's weights; None where it is "auto"."""

    grad_scaler: Mapping[str, float | int] | None
    """Arguments for ``torch.amp.GradScaler``; None unless the dtype is fp16."""

    auto: tuple[str, ...]
    """The keys, as in "optimizer.params.lr", that are "auto": left to the program, as with HF.

    Those of ZenFlow are "auto" where the file lacks them, as they are in DeepSpeed.
    """

    @property
    def auto_knobs(self) -> tuple[str, ...]:
        """Names of fields of ``config`` that are "auto"; ``config`` has a first value for each.

        ``update_interval`` starts at 1, and DeepSpeed lengthens windows in the course of training.
        Here a controller does so, such as ``autotune.online.zen_auto.ZenAuto``.
        ``select_strategy`` and ``select_interval``, "auto" together or not at all, start at one
        selection an epoch, as DeepSpeed documents, and need no controller.
        """
        prefix = "zero_optimization.zenflow."
        return tuple(name.removeprefix(prefix) for name in self.auto if name.startswith(prefix))

    @property
    def num_gpus(self) -> int | None:
        """Number of GPUs that the three batch keys imply; None where a key is not given."""
        micro, steps = self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps
        if micro is None or steps is None or self.train_batch_size is None:
            return None
        return self.train_batch_size // (micro * steps)

    def batch_on(self, num_gpus: int) -> tuple[int | None, int | None]:
        """Return samples of a forward pass on each GPU, and backward passes of a step.

        Of samples of a step, of a forward pass and backward passes, two give the third, as in
        DeepSpeed (runtime/config.py). None is for the program to give.

        Args:
            num_gpus: Number of GPUs that train.

        Raises:
            ConfigError: The file's numbers are not those of so many GPUs.
        """
        micro, steps = self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps
        total = self.train_batch_size
        if total is None or (micro and "gradient_accumulation_steps" in self.auto):
            return micro, steps
        rest, left = divmod(total, (micro or 1) * (steps or 1) * num_gpus)
        if left or rest < 1 or (micro and steps and rest != 1):
            rule = "must be" if micro and steps else "must be a multiple of"
            names = [_BATCH_KEYS[0]] * bool(micro) + [_BATCH_KEYS[1]] * bool(steps)
            raise ConfigError(
                f"train_batch_size {rule} {' * '.join([*names, 'the number of GPUs'])}, as "
                f"DeepSpeed checks, got {total} on {num_gpus} GPU{'s' * (num_gpus > 1)}: train on "
                "as many GPUs as the file is for, or leave it out"
            )
        return (micro, steps or rest) if micro else (rest, steps)


def read_content(
    content: Mapping[str, Any], *, steps_per_epoch: int | None
) -> tuple[DeepSpeedSettings, Reading]:
    """Return a configuration's settings, and the findings; settings hold if no key is refused."""
    reading = Reading()
    root = reading.section(content, "")
    zero = reading.section(root.pop("zero_optimization", None), "zero_optimization")
    dtype, grad_scaler = _precision(reading, root)
    batch = _batch(reading, root)
    if root.pop("gradient_allreduce_op", "mean") != "mean":
        reading.refuse("gradient_allreduce_op", "gradients are averaged; remove it")
    settings = DeepSpeedSettings(
        config=read_rule(reading, zero, steps_per_epoch),
        optimizer=_optimizer(reading, root.pop("optimizer", None)),
        schedule=read_schedule(reading, root.pop("scheduler", None)),
        # 0 is DeepSpeed's "no clipping".
        max_grad_norm=reading.number(root.pop("gradient_clipping", None), "gradient_clipping")
        or None,
        **batch,
        dtype=dtype,
        grad_scaler=grad_scaler,
        auto=tuple(reading.auto),
    )
    reading.sort(root, "")
    return settings, reading


def _optimizer(reading: Reading, value: object) -> dict[str, Any]:
    """Return the arguments for ``ZenFlowAdamW``."""
    section = reading.section(value, "optimizer")
    if not section:
        return {}
    kind = section.pop("type", None)
    if str(kind).lower() not in {"adam", "adamw"}:
        reading.refuse("optimizer.type", f"got {kind!r}; use Adam or AdamW")
    params = reading.section(section.pop("params", None), "optimizer.params")
    reading.sort(section, "optimizer.")
    for flag, rule in _ADAMW_FLAGS.items():
        if params.pop(flag, rule) is not rule:
            reading.refuse(f"optimizer.params.{flag}", "the update is AdamW's; remove it")
    arguments = {}
    for key, default in _DEEPSPEED_ADAM.items():
        given = params.pop(key, default)
        if not reading.is_auto(given, f"optimizer.params.{key}"):
            arguments[key] = _argument(reading, key, given)
    reading.sort(params, "optimizer.params.")
    return arguments


def _argument(reading: Reading, key: str, value: Any) -> Any:
    name = f"optimizer.params.{key}"
    if key == "betas":
        if isinstance(value, (list, tuple)) and len(value) == 2 and all(map(_is_beta, value)):
            return (float(value[0]), float(value[1]))
        reading.correct(name, f"must be two numbers in [0, 1), got {value!r}: correct it")
    elif is_number(value):
        return float(value)
    else:
        reading.correct(name, f"must be a finite number >= 0, got {value!r}: correct it")
    return None


def _is_beta(value: object) -> bool:
    return is_number(value) and value < 1


def _batch(reading: Reading, root: dict[str, Any]) -> dict[str, int | None]:
    """Return the batch keys; those that are absent or "auto" are None."""
    given = {key: root.pop(key, None) for key in _BATCH_KEYS}
    batch = {
        key: None if value is None else reading.count(value, key) for key, value in given.items()
    }
    total = batch["train_batch_size"]
    factors = {key: count for key in _BATCH_KEYS[:2] if (count := batch[key]) is not None}
    if total is not None and total % math.prod(factors.values()):
        reading.correct(
            "train_batch_size",
            f"must be a multiple of {' * '.join(factors)}, as DeepSpeed checks, got {total} and "
            f"{' * '.join(map(str, factors.values()))}: correct one, or leave one out",
        )
    return batch


def _precision(
    reading: Reading, root: dict[str, Any]
) -> tuple[Dtype | None, dict[str, float | int] | None]:
    """Return the dtype (None for "auto"), and the loss scaler's arguments for fp16."""
    sections = {
        "bf16": reading.section(root.pop("bf16", root.pop("bfloat16", None)), "bf16"),
        "fp16": reading.section(root.pop("fp16", None), "fp16"),
    }
    scaler = _grad_scaler(reading, sections["fp16"])
    switches = {name: section.pop("enabled", False) for name, section in sections.items()}
    for name, section in sections.items():
        if switches[name]:  # what an unused precision says doesn't matter
            reading.sort(section, f"{name}.")
    enabled = [name for name, switch in switches.items() if switch is True]
    if len(enabled) > 1:
        reading.refused.append(
            ("fp16.enabled", "bf16 and fp16 can't both be enabled: switch one off")
        )
    if "fp16" in enabled:
        return "fp16", scaler
    if "bf16" in enabled:
        return "bf16", None
    auto = [reading.is_auto(switch, f"{name}.enabled") for name, switch in switches.items()]
    return (None if any(auto) else "fp32"), None


def _grad_scaler(reading: Reading, fp16: dict[str, Any]) -> dict[str, float | int]:
    """Return the arguments of ``torch.amp.GradScaler`` for DeepSpeed's keys and defaults."""
    values = {key: fp16.pop(key, default) for key, default in _LOSS_SCALE.items()}
    for key, value in values.items():
        if not is_number(value):
            reading.correct(f"fp16.{key}", f"must be a number >= 0, got {value!r}: correct it")
            return {}
    if values["loss_scale"]:
        # Never grows. After an overflow it backs off, where DeepSpeed would skip on for ever.
        return {"init_scale": float(values["loss_scale"]), "growth_interval": 2**31 - 1}
    init_scale = 2.0 ** values["initial_scale_power"]
    return {"init_scale": init_scale, "growth_interval": int(values["loss_scale_window"])}
