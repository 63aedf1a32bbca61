"""Nearest record: what is known of a setting's accuracy, and what of it nobody has recorded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from experiments.recorded.losses import RecordedLoss, recorded

_K_SCALE = 0.1
"""Difference of k that counts as much as twice the S or ten times the learning rate."""
_SIZE_WEIGHT = 0.5
"""Weight of ten times the parameters, beside ten times the learning rate."""
_FLOOR = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A training whose loss is asked for."""

    rule: str
    """Name of the update rule, `ZenFlowConfig.update_rule`."""
    topk_ratio: float
    """Share of columns on the device, k."""
    update_interval: int
    """Steps of a window, S."""
    lr: float
    """Peak learning rate of AdamW."""
    num_params: int
    """Number of the model's parameters."""
    from_scratch: bool
    """Whether it begins with random weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Record nearest to a training, and the training's properties outside of all records."""

    nearest: RecordedLoss
    outside: tuple[str, ...]
    """Properties of the training that lie outside of all records of its kind, in words."""

    def __str__(self) -> str:
        """Return both in sentences."""
        row = self.nearest
        kind, scale, unit = (
            ("accuracy", 100, " points") if row.is_accuracy else ("held-out loss", 100, "%")
        )
        seeds = f"{row.seeds} seed{'s' if row.seeds > 1 else ''}"
        low, mean, high = (f"{scale * value:+.2f}" for value in (row.least, row.mean, row.most))
        text = (
            f"Nearest record: {row.task}, {_size(row.num_params)} parameters, k = "
            f"{row.topk_ratio:g}, S = {row.update_interval}, learning rate {row.lr:g}: {kind} "
            f"{mean}{unit} beside AdamW ({low} to {high}, {seeds}; {row.record})."
        )
        if self.outside:
            text += f" Outside of what was recorded: {'; '.join(self.outside)}."
        return f"{text} Compare short runs."

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {"nearest": asdict(self.nearest), "outside": list(self.outside)}


def evidence(asked: Training, rows: Sequence[RecordedLoss] | None = None) -> Evidence | None:
    """Return the record nearest to a training; None if there is none of its rule.

    The kind of training (fine-tuning, or from random weights) counts before everything else, and
    then whether any column is on the device.

    Args:
        asked: The training.
        rows: Recorded losses; None takes those of the package.
    """
    own = [row for row in (recorded() if rows is None else rows) if row.rule == asked.rule]
    same = [row for row in own if row.from_scratch == asked.from_scratch]
    if not own:
        return None
    nearest = min(
        same or own,
        key=lambda row: ((row.topk_ratio > 0) != (asked.topk_ratio > 0), _distance(asked, row)),
    )
    missing = () if same else ("from random weights" if asked.from_scratch else "fine-tuning",)
    return Evidence(nearest=nearest, outside=(*missing, *_outside(asked, same or own)))


def _distance(asked: Training, row: RecordedLoss) -> float:
    return (
        abs(asked.topk_ratio - row.topk_ratio) / _K_SCALE
        + abs(math.log2(asked.update_interval / row.update_interval))
        + abs(math.log10(max(asked.lr, _FLOOR) / row.lr))
        + _SIZE_WEIGHT * abs(math.log10(asked.num_params / row.num_params))
    )


def _outside(asked: Training, rows: Sequence[RecordedLoss]) -> Iterator[str]:
    """Yield each figure that is below or above all that was recorded, with their range."""
    shown: tuple[tuple[str, str, Callable[[float], str]], ...] = (
        ("num_params", "model size", lambda value: _size(int(value))),
        ("topk_ratio", "k", "{:g}".format),
        ("update_interval", "S", "{:g}".format),
        ("lr", "learning rate", "{:g}".format),
    )
    for name, word, show in shown:
        value, known = getattr(asked, name), [getattr(row, name) for row in rows]
        if not min(known) <= value <= max(known):
            yield f"{word} ({show(value)}; recorded {show(min(known))} to {show(max(known))})"


def _size(count: int) -> str:
    """Return a number of parameters in few digits.

    >>> [_size(n) for n in (8_030_261_248, 22_713_986, 801_024)]
    ['8.03B', '22.7M', '0.801M']
    """
    return f"{count / 1e9:.3g}B" if count >= 1e9 else f"{count / 1e6:.3g}M"
