"""Kinds of runs by what bounds their steps: predictions of each kind err in a way of its own."""

from __future__ import annotations

from typing import Literal

from sim.simulate import Strategy
from sim.steady import steady
from sim.timing.costs import StepCosts, without_launches

Regime = Literal[
    "offload",
    "launch-bound",
    "several hosts",
    "devices, no offload",
    "device alone",
]
"""Kinds of runs: those that send gradients or activations to the host; others whose compute is
bound by launches; and all others, by how many devices and hosts there are."""

_LAUNCH_BOUND = 0.8
"""Share of compute below which the device's own work counts as bound by launches."""


def regime_of(costs: StepCosts, strategy: Strategy) -> Regime:
    """Return the kind of a run.

    Args:
        costs: Of one step, from a workload.
        strategy: What runs.
    """
    hardware = costs.hardware
    one_window = steady(costs, strategy, num_steps=1, settling_windows=1, longest_settling=1)
    if one_window.d2h_bytes > 0:
        return "offload"
    if without_launches(costs).compute_seconds < _LAUNCH_BOUND * costs.compute_seconds:
        return "launch-bound"
    if hardware.total_devices == 1:
        return "device alone"
    return "several hosts" if hardware.num_hosts > 1 else "devices, no offload"
