"""Learning rate of each step of a run."""

from __future__ import annotations

import math

from experiments.training.settings.schedule import named_schedule
from experiments.training.settings.training import TrainSettings


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
    named = named_schedule(settings.schedule, settings.schedule_params)
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
    named = named_schedule(settings.schedule, settings.schedule_params)
    if named is None:
        return share
    return max(1, share) if named.warmup_steps is None else named.warmup_steps


def end_of_fall(settings: TrainSettings, total_steps: int) -> int | None:
    """Return the step behind which the learning rate falls no more; None where it never does."""
    named = named_schedule(settings.schedule, settings.schedule_params)
    if settings.schedule in ("constant", "WarmupLR"):
        return None
    return total_steps if named is None or named.total_steps is None else named.total_steps
