"""Schedules of the learning rate that a run may ask for: ours, and DeepSpeed's by their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zenflow.deepspeed.reading import Reading
from zenflow.deepspeed.schedule import KINDS, DeepSpeedSchedule, read_schedule
from zenflow.errors import ConfigError, raise_violations

OWN_SCHEDULES = ("constant", "linear", "cosine")
"""Schedules that rise along a line over a share of the steps, ``warmup``."""

SCHEDULES = (*OWN_SCHEDULES, *KINDS)


def named_schedule(kind: str, params: Mapping[str, Any]) -> DeepSpeedSchedule | None:
    """Return DeepSpeed's schedule that a run asks for; None for one of our own.

    Parameters left out are the run's own, as where a DeepSpeed JSON has "auto".

    Args:
        kind: Setting ``schedule`` of the run.
        params: Setting ``schedule_params``.

    Raises:
        ConfigError: The parameters are not those of the schedule.
    """
    if kind not in KINDS:
        if params:
            raise ConfigError(
                f"schedule_params are for {', '.join(KINDS)}, but schedule is "
                f"{kind!r}: leave them out"
            )
        return None
    if "warmup_max_lr" in params:
        raise ConfigError("schedule_params can't have warmup_max_lr: give it as lr")
    filled: dict[str, Any] = dict(params)
    filled.setdefault("warmup_num_steps", "auto")
    if kind != "WarmupCosineLR":
        filled["warmup_max_lr"] = "auto"
    if kind != "WarmupLR":
        filled.setdefault("total_num_steps", "auto")
    reading = Reading()
    found = read_schedule(reading, {"type": kind, "params": filled})
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
