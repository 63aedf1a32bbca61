"""Settings that ``--compare`` adds to a run's: strategies, their knobs, and a common start."""

from __future__ import annotations

from collections.abc import Mapping

COMPARED = ("on_device", "zero_offload", "zenflow_paper", "zenflow")
"""The strategies of ``--compare``, in the order of the table."""

_BLOCK_KNOBS = ("min_split_elements", "block_elements")
_PUBLISHED_KNOBS = (
    *_BLOCK_KNOBS,
    "topk_ratio",
    "update_interval",
    "select_strategy",
    "select_interval",
    "full_warm_up_rounds",
    "importance_decay",
    "hysteresis",
)
KNOBS_OF_PRESET: Mapping[str, tuple[str, ...]] = {
    "on_device": (),
    "zero_offload": _BLOCK_KNOBS,
    "zenflow_paper": _PUBLISHED_KNOBS,
}
"""Knobs a comparison hands on to a baseline: those that don't turn it into another strategy.
A preset that is not listed takes every knob."""

COMPARE_STEPS = 500

START_SHARE = 0.6
"""Steps of a comparison's start as a share of its own.

Offloaded training is fine-tuning: a model with random weights is trained a little first, on the
device and once, and all strategies go on from there.
"""

START_LR = 2e-3
"""Peak learning rate of that start: what a small model learns fast with."""

_MOST_EVALUATIONS = 8
"""Points of each strategy's held-out loss in a comparison's picture."""


def pace_of_evaluations(steps: int, recorded: int) -> int:
    """Return the steps between a comparison's evaluations.

    None falls among the last steps, ``recorded`` ones, whose timeline is drawn; the end has one.
    """
    for count in range(_MOST_EVALUATIONS, 1, -1):
        every = (steps - recorded) // (count - 1)
        if every > 0 and every * count >= steps:
            return every
    return steps
