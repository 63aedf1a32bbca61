"""Selection: what choosing a block's columns anew and handing them over takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from experiments.calibration.runs import observe
from experiments.training.settings.training import TrainSettings
from sim.hardware.profile import HardwareProfile
from sim.timing.block_plan import BlockPlan
from sim.timing.costs import costs_of

_INTERVAL = 2
"""Steps of a window, and between two selections: every block selects in every window."""
_LEAST_SECONDS = 1e-6
RUNS = 2
"""Number of runs: one with selections, one without."""


def measure_selection(
    base: TrainSettings,
    model: str,
    profile: HardwareProfile,
    *,
    turns: int,
    on_turn: Callable[[], None],
) -> float:
    """Return the seconds of one block's selection.

    Runs with selections in every window and with the first only take turns, over no link that
    would have to be waited for; the difference of a step, times the steps of a window, is what
    all blocks take together.
    """
    settings = [
        replace(
            base,
            strategy="zenflow",
            model=model,
            batch_size=1,
            sequence=64,
            knobs={"update_interval": _INTERVAL, "select_interval": interval},
        )
        for interval in (_INTERVAL, 0)
    ]
    often, never = (
        run.observation.step_seconds
        for run in observe(settings, turns=turns, windows=4, on_turn=on_turn)
    )
    costs = costs_of(settings[0].workload(), profile)
    blocks = len(BlockPlan(costs, settings[0].config(None)).blocks)
    return max(_LEAST_SECONDS, (often - never) * _INTERVAL / blocks)
