"""From DeepSpeed's ``scheduler`` to a learning-rate schedule, by DeepSpeed's own formulas."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast

from zenflow.errors import ConfigError, unknown_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zenflow.deepspeed.reading import Reading

Kind = Literal["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]
Rise = Literal["log", "linear"]

KINDS: tuple[Kind, ...] = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
"""Names of DeepSpeed's schedules that are followed."""
RISES: tuple[Rise, ...] = ("log", "linear")
"""Names of DeepSpeed's courses of the rise: logarithmic and linear."""

_REMEDIES: Mapping[str, str] = {
    "OneCycle": "use torch.optim.lr_scheduler.OneCycleLR in your own loop (DeepSpeed's cycles "
    "momentum too), or WarmupCosineLR here",
    "LRRangeTest": "a test of rates is no schedule to train with: remove it, and put the rate "
    "that it found into optimizer.params.lr",
}
_PREFIX = "scheduler.params."
_RATES = {"warmup_min_lr": "min_lr", "warmup_max_lr": "max_lr"}
_NUMBERS: Mapping[Kind, Mapping[str, str]] = {
    "WarmupLR": _RATES,
    "WarmupDecayLR": _RATES,
    "WarmupCosineLR": {"warmup_min_ratio": "min_ratio", "cos_min_ratio": "cos_min_ratio"},
}
"""Numeric parameters of each kind of schedule, and their fields here."""
_OF_SOME = ("total_num_steps", *_RATES, *_NUMBERS["WarmupCosineLR"])
"""Parameters that not all kinds have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedSchedule:
    """One of DeepSpeed's learning-rate schedules. Defaults of its fields are DeepSpeed's."""

    kind: Kind
    """DeepSpeed's name: after the rise the rate is constant, falls on a line, or by a cosine."""

    max_lr: float | None = None
    """Learning rate at the end of the rise; None is the optimizer's own."""

    min_lr: float = 0.0
    """Learning rate that the rise starts from, unless ``kind`` is ``WarmupCosineLR``."""

    min_ratio: float = 0.0
    """Share of the optimizer's learning rate that the rise of ``WarmupCosineLR`` starts from."""

    cos_min_ratio: float = 1e-4
    """Share of the optimizer's learning rate at which ``WarmupCosineLR`` ends."""

    warmup_type: Rise = "log"
    """Course of the rise: with the logarithm of the step, or linear."""

    warmup_steps: int | None = 1000
    """Steps of the rise; None where it is "auto"."""

    total_steps: int | None = None
    """Steps until the fall has ended; None where it is "auto", or where nothing falls."""

    def filled(
        self, *, warmup_steps: int | None = None, total_steps: int | None = None
    ) -> DeepSpeedSchedule:
        """Return the schedule with numbers of steps for those that are "auto".

        Raises:
            ConfigError: A number that it needs is neither in the file nor here, or is below 1; or
                the schedule is none of DeepSpeed's.
        """
        if self.kind not in KINDS:
            raise ConfigError(f"kind {unknown_name(self.kind, KINDS)}")
        if self.warmup_type not in RISES:
            raise ConfigError(f"warmup_type {unknown_name(self.warmup_type, RISES)}")
        made = replace(
            self,
            warmup_steps=self.warmup_steps if self.warmup_steps is not None else warmup_steps,
            total_steps=self.total_steps if self.total_steps is not None else total_steps,
        )
        needed = {"warmup_steps": made.warmup_steps}
        if self.kind != "WarmupLR":
            needed["total_steps"] = made.total_steps
        for name, count in needed.items():
            if count is None or count < 1:
                raise ConfigError(
                    f"{self.kind} needs {name} of at least 1, got {count}: the file leaves it to "
                    f'the program ("auto"), so pass {name}='
                )
        return made

    def factor(self, done: int, lr: float) -> float:
        """Return the factor on a learning rate for the step behind ``done`` steps.

        Numbers of steps that are "auto" have to be ``filled`` before.

        DeepSpeed's schedules are a step late: their first two steps have the rate at which the
        rise starts. (``WarmupCosineLR`` starts its first one at 0, whatever ``min_ratio`` says.)

        Args:
            done: Steps that were taken.
            lr: Learning rate at the end of the rise; the factor is on this one.
        """
        if self.kind == "WarmupCosineLR":
            return self._cosine_factor(done - 1)
        start = self.min_lr / lr if self.min_lr else 0.0
        return start + (1.0 - start) * (self._height(done - 1) if done else 0.0)

    def _height(self, step: int) -> float:
        """Return a step's height on the rise, from 0 at the start to 1 at the end."""
        warmup = self._warmup
        if step < warmup:
            return self._risen(step)
        if self.kind == "WarmupLR":
            return 1.0
        total = cast("int", self.total_steps)
        return max(0.0, (total - step) / max(1.0, total - warmup))

    def _cosine_factor(self, step: int) -> float:
        warmup, total = self._warmup, cast("int", self.total_steps)
        if step < 0:
            return 0.0
        if step < warmup:
            return self.min_ratio + (1.0 - self.min_ratio) * self._risen(step)
        share = min(1.0, (step - warmup + 1) / max(1, total - warmup))
        height = (1 + math.cos(math.pi * share)) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * height)

    def _risen(self, step: int) -> float:
        if self.warmup_type == "log":
            return math.log(step + 1) / math.log(self._warmup)
        return step / self._warmup

    @property
    def _warmup(self) -> int:
        return max(2, cast("int", self.warmup_steps))


def read_schedule(reading: Reading, value: object) -> DeepSpeedSchedule | None:
    """Return the schedule of a ``scheduler`` section; None without one."""
    section = reading.section(value, "scheduler")
    if not section:
        return None
    kind = section.pop("type", None)
    params = reading.section(section.pop("params", None), "scheduler.params")
    reading.sort(section, "scheduler.")
    if kind not in KINDS:
        remedy = _REMEDIES.get(
            str(kind),
            f"use {', '.join(KINDS)}, or remove it and hand the optimizer to a scheduler of "
            "torch.optim.lr_scheduler",
        )
        reading.refuse("scheduler.type", f"got {kind!r}; {remedy}")
        return None
    if params.pop("last_batch_iteration", -1) != -1:
        reading.refuse(f"{_PREFIX}last_batch_iteration", "a run's place is its checkpoint's")
    fields = _fields(reading, kind, params)
    for name in [name for name in params if name in _OF_SOME]:
        reading.correct(f"{_PREFIX}{name}", f"is no parameter of {kind}: remove it")
        del params[name]
    reading.sort(params, _PREFIX)
    return DeepSpeedSchedule(kind=kind, **fields)


def _fields(reading: Reading, kind: Kind, params: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a schedule, and take their parameters out of ``params``."""
    made: dict[str, Any] = {"warmup_type": params.pop("warmup_type", "log")}
    if made["warmup_type"] not in RISES:
        rule = f"must be log or linear, got {made['warmup_type']!r}: correct it"
        reading.correct(f"{_PREFIX}warmup_type", rule)
    steps = params.pop("warmup_num_steps", 1000)
    made["warmup_steps"] = reading.count(steps, f"{_PREFIX}warmup_num_steps")
    if kind != "WarmupLR":
        steps = params.pop("total_num_steps", None)
        made["total_steps"] = reading.count(steps, f"{_PREFIX}total_num_steps")
    if kind == "WarmupDecayLR":
        params.setdefault("warmup_max_lr", 1e-3)  # the optimizer's own in the other kinds
    for name, field in _NUMBERS[kind].items():
        value = reading.number(params.pop(name, None), f"{_PREFIX}{name}")
        if value is not None:
            made[field] = value
    if made.get("max_lr") == 0:
        reading.correct(f"{_PREFIX}warmup_max_lr", "must be above 0, got 0: nothing would train")
    return made
