"""What falls to each step of a window in the steady state, by the engine's calendar."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sim.timing.block_plan import BlockPlan, intake_bytes, takes_last_in, update_bytes
from sim.timing.costs import StepCosts
from zenflow.config import ZenFlowConfig

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class WindowPhase:
    """One step of a window; each an array over segments in backward order."""

    uploads: Array
    """Bytes that land on the device."""
    intake: Array
    """Bytes of DRAM for gradients taken in."""
    update: Array
    """Bytes of DRAM for windows that end."""


def window_phases(plan: BlockPlan, costs: StepCosts, config: ZenFlowConfig) -> list[WindowPhase]:
    """Return what falls to each step of a window in the steady state, by the engine's calendar."""
    calendar = plan.calendar()
    count, size = len(costs.segments), costs.dtype_bytes
    window, lag = config.update_interval, config.effective_lag()
    is_fused = takes_last_in(config, lag)
    steps = config.full_warm_up_rounds + 3 * window + lag
    counts = [0] * len(plan.blocks)
    uploads = np.zeros((steps + lag + 1, count))
    phases = []
    for step in range(1, steps + 1):
        intake, update = np.zeros(count), np.zeros(count)
        for block in plan.blocks:
            place = count - 1 - block.segment
            counts[block.index] += 1
            n = counts[block.index]
            is_due = calendar.is_due(block.index, step)
            if not (is_fused and is_due):
                cost = intake_bytes(config, size, is_first=n == 1)
                intake[place] += block.elements * cost
            if is_due:
                cost = update_bytes(config, size, count=n, is_fused=is_fused)
                update[place] += block.elements * cost
                uploads[step + calendar.lag(step), place] += block.elements * size
                counts[block.index] = 0
                calendar.close(block.index, step)
        phases.append(WindowPhase(uploads[step], intake * costs.intake_factor, update))
    return phases[-window:]
