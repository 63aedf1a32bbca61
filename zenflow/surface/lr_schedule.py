"""``deepspeed_lr_scheduler``: a DeepSpeed schedule as a scheduler of torch."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.optim.lr_scheduler import LambdaLR

from zenflow.errors import ConfigError

if TYPE_CHECKING:
    from zenflow.deepspeed.schedule import DeepSpeedSchedule


def deepspeed_lr_scheduler(
    optimizer: torch.optim.Optimizer,
    schedule: DeepSpeedSchedule | None,
    *,
    warmup_steps: int | None = None,
    total_steps: int | None = None,
) -> LambdaLR:
    """Return a scheduler with DeepSpeed's learning rates, step for step.

    Call its ``step()`` behind each ``optimizer.step()``, as DeepSpeed's engine does, and not where
    a loss scale overflowed.

    Args:
        optimizer: Any optimizer; a ``max_lr`` of the schedule replaces its groups' rates.
        schedule: ``read_deepspeed(...).schedule``; None, a file without one, is a constant rate.
        warmup_steps: Steps of the rise, where the file has "auto".
        total_steps: Steps until the fall has ended, where the file has "auto".

    Raises:
        ConfigError: The schedule needs a number of steps that is not given, or would raise a
            group's rate of 0.
    """
    if schedule is None:
        return LambdaLR(optimizer, lambda done: 1.0)
    made = schedule.filled(warmup_steps=warmup_steps, total_steps=total_steps)
    for group in optimizer.param_groups:
        if made.max_lr is not None:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(made.max_lr)
            else:
                group["lr"] = made.max_lr
        if made.min_lr and not group["lr"]:
            raise ConfigError(
                f"a rise from warmup_min_lr ({made.min_lr}) needs a learning rate above 0 in each "
                "group, got 0: give it max_lr, or the group a rate"
            )
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    return LambdaLR(optimizer, [partial(made.factor, lr=rate) for rate in rates])
