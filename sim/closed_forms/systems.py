"""Closed forms of other systems' schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from sim.closed_forms.parts import HostTasks, served
from sim.closed_forms.step import Axes, Steady, StepTimes


def on_device(times: StepTimes, axes: Axes) -> Steady:
    """Return forward, backward and AdamW on the device in turn; nothing waits."""
    overheads = times.costs.hardware.overheads
    step = overheads.step.value + times.costs.num_params / overheads.device_update.value
    seconds = times.passed(axes)[:, -1] + step
    nothing = np.zeros_like(seconds)
    return Steady(seconds, nothing, nothing, np.ones(len(seconds), bool))


def zero_offload(times: StepTimes, axes: Axes) -> Steady:
    """Return all phases in turn: only copies overlap backward, and nothing else is under way."""
    overheads, size = times.costs.hardware.overheads, times.costs.dtype_bytes
    passed = times.passed(axes)
    copies = times.copy_seconds(times.elements * 2.0, axes["d2h"])
    copied = served(passed, copies)[:, -1]
    stepped = passed[:, -1] + overheads.step.value
    total = times.elements.sum(keepdims=True)
    update = times.host_seconds(HostTasks(total * 28.0, 0.0 * total), axes)[:, 0]
    upload = times.copy_seconds(total * size, axes["h2d"])[:, 0]
    seconds = np.maximum(stepped, copied) + update + upload
    limits = axes["dram"] / times.rates.sharing
    alone = (axes["d2h"] <= limits) & (axes["h2d"] <= limits)
    alone &= np.maximum(axes["d2h"], axes["h2d"]) <= axes["duplex"]
    return Steady(seconds, seconds - stepped, np.zeros_like(seconds), alone)


SYSTEM_FORMULAS: Mapping[str, Callable[[StepTimes, Axes], Steady]] = {
    "published_on_device": on_device,
    "published_zero_offload": zero_offload,
}
"""Formulas by the strategy's name."""
