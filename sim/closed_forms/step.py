"""Common parts of all closed forms: passes, copies and host tasks of many machines at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sim.closed_forms.parts import Array, HostTasks
from sim.machine import Rates
from sim.timing.costs import StepCosts

Axes = dict[str, Array]
"""Values of N machines by name: (N,), but ``share``, the segments' shares of backward, (N, L)."""


@dataclass(frozen=True, slots=True)
class Steady:
    """Step time and stall of each machine, seconds, and whether the formula holds for it.

    See `sim.closed_forms.steady.ClosedForm`.
    """

    step_seconds: Array
    """Seconds of a step on each machine."""
    stall_seconds: Array
    """Seconds of a step in which the device waits."""
    selection_seconds: Array
    """Seconds of selections of columns in both, spread over the steps between."""
    applies: NDArray[np.bool_]
    """Whether the formula holds."""


class StepTimes:
    """Seconds of the parts of one model's step, on the machines of given axes.

    Attributes:
        costs: Of one step.
        rates: Of the costs' own machine.
        elements: Number of elements of each segment in the order of backward, (L,).
    """

    def __init__(self, costs: StepCosts) -> None:
        """Prepare what no machine changes."""
        self.costs = costs
        self.rates = Rates.of(costs.hardware)
        self.elements = np.array([float(segment.numel) for segment in costs.segments[::-1]])

    def passed(self, axes: Axes, intake: Array | float = 0.0) -> Array:
        """Return the end of backward of each segment in the last micro-batch, (N, L)."""
        seconds = axes["backward"][:, None] * axes["share"] + intake
        before = self.costs.accumulation * axes["forward"]
        before = before + (self.costs.accumulation - 1) * axes["backward"]
        passed: Array = before[:, None] + np.cumsum(seconds, axis=1)
        return passed

    def copy_seconds(self, num_bytes: Array, rate: Array, packing: float = np.inf) -> Array:
        """Return the seconds of each copy, (N, L); 0 where there are no bytes."""
        hardware = self.costs.hardware
        fixed = hardware.overheads.copy.value + hardware.link.latency.value + num_bytes / packing
        seconds: Array = np.where(num_bytes > 0, fixed + num_bytes / rate[:, None], 0.0)
        return seconds

    def host_seconds(self, tasks: HostTasks, axes: Axes) -> Array:
        """Return the seconds of each host task, (N, L): of its bytes or its arithmetic."""
        task = self.costs.hardware.overheads.host_task.value
        rate = np.minimum(axes["host"], axes["dram"] / self.rates.host_sharing)
        moving = tasks.num_bytes / rate[:, None]
        work = np.maximum(moving, tasks.steps / axes["steps"][:, None])
        seconds: Array = np.where(tasks.num_bytes > 0, task + work, 0.0)
        return seconds

    def copies_are_free(self, axes: Axes, *, both_ways: bool) -> NDArray[np.bool_]:
        """Return whether copies run at their links' rates whatever the host does, (N,).

        Max-min fairness gives a flow all it can take where that is no more than an equal share.
        """
        copies = 2 if both_ways else 1
        share = axes["dram"] / (self.rates.sharing * copies + self.rates.host_sharing)
        free: NDArray[np.bool_] = np.maximum(axes["d2h"], axes["h2d"]) <= share
        down, up = axes["d2h"], axes["h2d"]
        at_once = down + up if both_ways else np.maximum(down, up)
        together: NDArray[np.bool_] = at_once <= axes["duplex"] * (1 + 1e-12)
        return free & together
