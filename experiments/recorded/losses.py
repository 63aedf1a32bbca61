"""Recorded losses: what settings of the update rule cost beside AdamW, from committed records.

Records come with a clone only, so `losses.json` has their numbers. `python -m
evidence.pages.recorded_losses` makes it.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("losses.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedLoss:
    """Loss under one setting of the update rule, compared with AdamW's on the same seeds."""

    record: str
    """Folder of the record under `evidence/results`."""
    task: str
    """Kind of training, in words."""
    from_scratch: bool
    """Whether it began with random weights."""
    num_params: int
    """Number of the model's parameters."""
    lr: float
    """Peak learning rate of AdamW."""
    rule: str
    """Name of the update rule, `ZenFlowConfig.update_rule`."""
    topk_ratio: float
    """Share of columns on the device, k."""
    update_interval: int
    """Steps of a window, S."""
    host_state: str
    """Numbers of the host's states, `ZenFlowConfig.host_state`."""
    gradient_link: str
    """Numbers of gradients on the link, `ZenFlowConfig.gradient_link`."""
    seeds: int
    """Number of seeds that the means are over."""
    is_accuracy: bool
    """Whether the differences are of accuracy (in 1), not of held-out loss (in shares of it)."""
    mean: float
    """Mean difference to AdamW over the seeds."""
    least: float
    """Least difference of a seed."""
    most: float
    """Largest difference of a seed."""


@functools.cache
def recorded() -> tuple[RecordedLoss, ...]:
    """Return everything that is recorded."""
    return tuple(RecordedLoss(**row) for row in json.loads(FILE.read_text(encoding="utf-8")))
