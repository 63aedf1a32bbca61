"""From DeepSpeed's ``scheduler`` to a learning-rate schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from zenflow.deepspeed.reading import is_number

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zenflow.deepspeed.reading import Reading

Shape = Literal["constant", "linear", "cosine"]

_SHAPES: Mapping[str, Shape] = {
    "WarmupLR": "constant",
    "WarmupDecayLR": "linear",
    "WarmupCosineLR": "cosine",
}
# Defaults are DeepSpeed's.
_NUM_WARMUP = 1000
_MAX_LR = {"WarmupDecayLR": 1e-3}
_LEAST_COSINE = 1e-4
_NAME = "scheduler.params."
_LOGARITHMIC = (
    "the learning rate rises linearly here, and with the logarithm of the step in DeepSpeed "
    'unless scheduler.params has "warmup_type": "linear"'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedSchedule:
    """A rise of the learning rate from 0, and what comes behind it."""

    shape: Shape
    """Course after the rise: constant, or down to 0 along a line or half a cosine."""

    max_lr: float | None
    """Learning rate at the end of the rise; None is the optimizer's own."""

    warmup_steps: int | None
    """Steps of the rise; None where it is "auto"."""

    total_steps: int | None
    """Steps of the run; None where it is "auto", or where nothing comes down."""


def read_schedule(reading: Reading, value: object) -> DeepSpeedSchedule | None:
    """Return the schedule of a ``scheduler`` section; None without one."""
    section = reading.section(value, "scheduler")
    if not section:
        return None
    kind = section.pop("type", None)
    params = reading.section(section.pop("params", None), "scheduler.params")
    reading.sort(section, "scheduler.", (), {}, ("type", "params"))
    if kind not in _SHAPES:
        reading.refuse(
            "scheduler.type",
            f"got {kind!r}; use {', '.join(_SHAPES)}, or remove it and hand the optimizer to a "
            "scheduler of torch.optim.lr_scheduler",
        )
        return None
    _check_rise(reading, params)
    name = f"{_NAME}warmup_num_steps"
    warmup = reading.count(params.pop("warmup_num_steps", _NUM_WARMUP), name)
    max_lr = total = None
    if kind == "WarmupCosineLR":
        least = params.pop("cos_min_ratio", _LEAST_COSINE)
        if not is_number(least) or least > _LEAST_COSINE:
            reading.refuse(f"{_NAME}cos_min_ratio", f"got {least!r}; the rate goes down to 0")
    else:
        max_lr = params.pop("warmup_max_lr", _MAX_LR.get(kind))
        max_lr = reading.number(max_lr, f"{_NAME}warmup_max_lr")
    if kind != "WarmupLR":
        total = reading.count(params.pop("total_num_steps", None), f"{_NAME}total_num_steps")
    known = ("warmup_num_steps", "total_num_steps", "warmup_max_lr", "warmup_min_lr")
    reading.sort(params, _NAME, (), {}, known)
    return DeepSpeedSchedule(
        shape=_SHAPES[kind], max_lr=max_lr, warmup_steps=warmup, total_steps=total
    )


def _check_rise(reading: Reading, params: dict[str, Any]) -> None:
    """Refuse a rise that does not start at 0; note one that is not linear."""
    for key in ("warmup_min_lr", "warmup_min_ratio"):
        start = params.pop(key, 0)
        if not reading.is_auto(start, f"{_NAME}{key}") and start != 0:
            reading.refuse(f"{_NAME}{key}", f"got {start!r}; the rate rises from 0")
    if params.pop("last_batch_iteration", -1) != -1:
        reading.refuse(f"{_NAME}last_batch_iteration", "a run's place is its checkpoint's")
    rise = params.pop("warmup_type", "log")
    if rise == "log":
        reading.notes.append(_LOGARITHMIC)
    elif rise != "linear":
        reading.refused.append(f"{_NAME}warmup_type must be log or linear, got {rise!r}")
