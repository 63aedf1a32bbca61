"""A machine whose figures the tuner does not know: the simulator, bent where its model is blind.

Constants are drawn about the table's; the link and the host's threads slow the device down in a
way that the simulator has no word for; every setting has an error of its own; steps are noisy,
and now and then one is far too long.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field

import numpy as np

from autotune.efficiency import FITTED, EnergyCurve
from autotune.measured import Stretch, robust_mean
from autotune.twin import NEUTRAL, Forecast, Twin
from sim.catalog import find_machine
from sim.hardware import HardwareProfile
from sim.models import find_model
from sim.workload import Workload
from zenflow.config import ZenFlowConfig
from zenflow.knobs import Knobs

SIGMA = 0.35
"""Of the hidden constants' logarithms."""
_SETTING_ERROR = 0.02
"""Standard deviation of each setting's own log error."""
_STEP_NOISE = 0.02
_SPIKE_SHARE = 0.02
"""Steps that are hit by something else."""
_SPIKE_SHAPE = 1.5
"""Of the Pareto distribution of what hits them: no finite variance."""
_LANE_NOISE = 0.03

HIDDEN = (
    "device.flops.bfloat16",
    "device.bandwidth",
    "device.launch",
    "link.d2h",
    "link.h2d",
    "host.dram",
    "host.core_bandwidth",
    "overheads.host_task",
    "overheads.copy",
    "overheads.step",
    "overheads.intake_bandwidth",
    "overheads.device_update",
)
"""Figures that differ from the table's."""

CASES = (
    ("llama-2-7b", "dgx-a100-80", 4),
    ("llama-2-7b", "dgx-a100-80", 1),
    ("llama-2-7b", "rtx4090-desktop", 2),
)
"""Model, machine, sequences: bound by compute, by the link, by the host's memory."""

CONFIG = ZenFlowConfig()


def known(case: int) -> tuple[Workload, HardwareProfile]:
    """Return a case's workload, and its machine as the table has it."""
    model, machine, batch = CASES[case % len(CASES)]
    workload = Workload.of_config(
        *find_model(model), batch_size=batch, sequence=1024, checkpointing=True
    )
    return workload, find_machine(machine, 1)


@dataclass(slots=True)
class HiddenMachine:
    """One draw of the truth."""

    seed: int
    curve: EnergyCurve = field(init=False)
    drift: float = 1.0
    """Factor on the seconds of both directions of the link, for tests that change it."""
    _rng: np.random.Generator = field(init=False)
    _twin: Twin = field(init=False)
    _contention: float = field(init=False)
    _count: int = 0

    def __post_init__(self) -> None:
        """Draw everything that is hidden."""
        self._rng = rng = np.random.default_rng(self.seed)
        workload, profile = known(self.seed)
        figures = profile.figures()
        values = {
            name: figures[name].value * math.exp(SIGMA * rng.standard_normal())
            for name in HIDDEN
            if name in figures
        }
        self._twin = Twin(workload, profile.with_values(values), CONFIG, windows=1)
        self._contention = rng.uniform(0.02, 0.15)
        power = rng.uniform(0.25, 0.75)
        self.curve = EnergyCurve.of(
            {k: k**power for k in (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5)}
        )

    def step_seconds(self, knobs: Knobs) -> float:
        """Return what a step of a setting takes without noise."""
        forecast = self._forecast(knobs)
        busy, step = forecast.busy_seconds, forecast.step_seconds
        copies = (busy["d2h"] + busy["h2d"]) / step
        slowed = step * (1 + self._contention * copies * busy["host"] / step)
        return slowed * math.exp(_SETTING_ERROR * self._own_error(knobs))

    def progress(self, knobs: Knobs) -> float:
        """Return goodput: steps of AdamW's worth per second."""
        rho = 1.0 - self.curve.captured(knobs.topk_ratio)
        return FITTED.of(knobs, rho) / self.step_seconds(knobs)

    def measure(self, knobs: Knobs) -> Stretch:
        """Return what an engine would measure of it."""
        count = max(12, 3 * knobs.update_interval)
        step, forecast = self.step_seconds(knobs), self._forecast(knobs)
        seconds = step * np.exp(_STEP_NOISE * self._rng.standard_normal(count))
        hit = self._rng.random(count) < _SPIKE_SHARE
        seconds += hit * 0.3 * step * self._rng.pareto(_SPIKE_SHAPE, count)
        mean, noise = robust_mean(seconds.tolist(), knobs.update_interval)
        self._count += 1
        captured = self.curve.captured(knobs.topk_ratio)
        captured *= math.exp(0.02 * self._rng.standard_normal())
        return Stretch(
            index=self._count - 1,
            last_step=self._count * count,
            knobs=knobs,
            step_seconds=mean,
            noise=noise,
            stall_seconds=forecast.stall_seconds,
            rho=1.0 - min(0.999, captured),
            busy_seconds={
                lane: value * math.exp(_LANE_NOISE * self._rng.standard_normal())
                for lane, value in forecast.busy_seconds.items()
            },
        )

    def _forecast(self, knobs: Knobs) -> Forecast:
        slower = {**NEUTRAL, "d2h": self.drift, "h2d": self.drift}
        return self._twin.forecast(knobs, slower)

    def _own_error(self, knobs: Knobs) -> float:
        """Return a number from a standard normal distribution that belongs to the setting."""
        digest = hashlib.sha256(f"{self.seed} {knobs}".encode()).digest()
        return float(np.random.default_rng(list(digest[:8])).standard_normal())
