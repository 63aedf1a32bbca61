"""The learning rate of each step: our schedules, and DeepSpeed's by their names."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from zenflow.deepspeed.reading import Reading
from zenflow.deepspeed.schedule import KINDS, DeepSpeedSchedule, read_schedule
from zenflow.errors import ConfigError, raise_violations

if TYPE_CHECKING:
    from experiments.training.settings.training import TrainSettings

OWN_SCHEDULES = ("constant", "linear", "cosine")
"""Schedules that rise along a line over a share of the steps, ``warmup``."""

SCHEDULES = (*OWN_SCHEDULES, *KINDS)


def schedule_factor(
    settings: TrainSettings, total_steps: int, done: int, rising: int | None = None
) -> float:
    """Return the factor on the learning rate of the step after ``done`` steps.

    Linear and cosine reach 0 just behind the last step, so that every step still counts.

    Args:
        settings: Of the run.
        total_steps: Steps that it takes.
        done: Steps that it has taken.
        rising: Steps of the rise; None for the settings' share of ``total_steps``.
    """
    if rising is None:
        rising = warmup_steps(settings, total_steps)
    named = named_schedule(settings)
    if named is not None:
        made = named.filled(warmup_steps=rising, total_steps=total_steps)
        return made.factor(done, settings.lr)
    if done < rising:
        return (done + 1) / (rising + 1)
    if settings.schedule == "constant":
        return 1.0
    share = min(1.0, (done - rising) / max(1, total_steps - rising))
    return 1.0 - share if settings.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * share))


def warmup_steps(settings: TrainSettings, total_steps: int) -> int:
    """Return over how many steps the learning rate rises."""
    share = round(settings.warmup * total_steps)
    named = named_schedule(settings)
    if named is None:
        return share
    return max(1, share) if named.warmup_steps is None else named.warmup_steps


def end_of_fall(settings: TrainSettings, total_steps: int) -> int | None:
    """Return the step behind which the learning rate falls no more; None where it never does."""
    named = named_schedule(settings)
    if settings.schedule in ("constant", "WarmupLR"):
        return None
    return total_steps if named is None or named.total_steps is None else named.total_steps


def named_schedule(settings: TrainSettings) -> DeepSpeedSchedule | None:
    """Return DeepSpeed's schedule that a run asks for; None for one of our own.

    What ``schedule_params`` leave out is the run's own, as where a DeepSpeed JSON has "auto".

    Raises:
        ConfigError: The parameters are not those of the schedule.
    """
    params: dict[str, Any] = dict(settings.schedule_params)
    if settings.schedule not in KINDS:
        if params:
            raise ConfigError(
                f"schedule_params are for {', '.join(KINDS)}, but schedule is "
                f"{settings.schedule!r}: leave them out"
            )
        return None
    if "warmup_max_lr" in params:
        raise ConfigError("schedule_params can't have warmup_max_lr: give it as lr")
    params.setdefault("warmup_num_steps", "auto")
    if settings.schedule != "WarmupCosineLR":
        params["warmup_max_lr"] = "auto"
    if settings.schedule != "WarmupLR":
        params.setdefault("total_num_steps", "auto")
    reading = Reading()
    found = read_schedule(reading, {"type": settings.schedule, "params": params})
    told = [words.replace("scheduler.params", "schedule_params") for _, words in reading.refused]
    raise_violations("the run", told)
    return found


def params_of(schedule: DeepSpeedSchedule) -> dict[str, Any]:
    """Return the ``schedule_params`` of a schedule; what is "auto" is left out, and so is lr."""
    params: dict[str, Any] = {
        "warmup_type": schedule.warmup_type,
        "warmup_num_steps": schedule.warmup_steps,
        "total_num_steps": schedule.total_steps,
    }
    if schedule.kind == "WarmupCosineLR":
        params |= {
            "warmup_min_ratio": schedule.min_ratio,
            "cos_min_ratio": schedule.cos_min_ratio,
        }
    else:
        params["warmup_min_lr"] = schedule.min_lr
    return {name: value for name, value in params.items() if value is not None}
