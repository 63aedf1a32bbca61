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
_FEW_SEEDS, _FEW_WEIGHT = 3, 0.5
"""Seeds below which a record counts as further away, by half of ten times the learning rate."""
_FLOOR = 1e-12
_FORMATS = {
    "host_state": {"float32": "float32 host state", "compact": "compact host state"},
    "gradient_link": {"model": "gradients that are not rounded", "e4m3": "8-bit gradients"},
}
"""Words for the numbers of states and gradients; the first of each are AdamW's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A training whose loss is asked for."""

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
    others: tuple[str, ...]
    """Numbers of the record's states and gradients that are not the training's, in words."""

    def __str__(self) -> str:
        """Return both in sentences."""
        row = self.nearest
        kind, scale, unit = (
            ("accuracy", 100, " points") if row.is_accuracy else ("held-out loss", 100, "%")
        )
        low, mean, high = (f"{scale * value:+.2f}" for value in (row.least, row.mean, row.most))
        seeds = f"{low} to {high}, {row.seeds} seeds" if row.seeds > 1 else "1 seed"
        formats = "".join(f", {word}" for word in _rounded(row))
        text = (
            f"Nearest record: {row.task}, {_size(row.num_params)} parameters, k = "
            f"{row.topk_ratio:g}, S = {row.update_interval}{formats}, learning rate {row.lr:g}: "
            f"{kind} {mean}{unit} beside AdamW ({seeds}; {row.record})."
        )
        if self.others:
            text += f" That record has {' and '.join(self.others)}."
        if self.outside:
            text += f" Outside of what was recorded: {'; '.join(self.outside)}."
        return f"{text} Compare short runs."

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {
            "nearest": asdict(self.nearest),
            "outside": list(self.outside),
            "others": list(self.others),
        }


def evidence(asked: Training, rows: Sequence[RecordedLoss] | None = None) -> Evidence | None:
    """Return the record nearest to a training; None if there is none of its rule.

    The kind of training (fine-tuning, or from random weights) counts before everything else, and
    then whether any column is on the device, then the numbers of states and gradients. Of records
    that are equally near, that of more seeds is taken, and then that of the larger difference.

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
        key=lambda row: (
            (row.topk_ratio > 0) != (asked.topk_ratio > 0),
            len(_others(asked, row)),
            _distance(asked, row),
            -row.seeds,
            -abs(row.mean),
        ),
    )
    missing = () if same else ("from random weights" if asked.from_scratch else "fine-tuning",)
    return Evidence(
        nearest=nearest,
        outside=(*missing, *_outside(asked, same or own)),
        others=_others(asked, nearest),
    )


def _rounded(row: RecordedLoss) -> Iterator[str]:
    """Yield words for a record's states and gradients that are rounded."""
    for name, words in _FORMATS.items():
        value = getattr(row, name)
        if value != next(iter(words)):
            yield words[value]


def _others(asked: Training, row: RecordedLoss) -> tuple[str, ...]:
    """Return words for a record's states and gradients that are not a training's."""
    return tuple(
        words[getattr(row, name)]
        for name, words in _FORMATS.items()
        if getattr(row, name) != getattr(asked, name)
    )


def _distance(asked: Training, row: RecordedLoss) -> float:
    return (
        abs(asked.topk_ratio - row.topk_ratio) / _K_SCALE
        + abs(math.log2(asked.update_interval / row.update_interval))
        + abs(math.log10(max(asked.lr, _FLOOR) / row.lr))
        + _SIZE_WEIGHT * abs(math.log10(asked.num_params / row.num_params))
        + _FEW_WEIGHT * (row.seeds < _FEW_SEEDS)
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
