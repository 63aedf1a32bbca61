"""A machine whose figures the tuner does not know: the simulator, bent where its model is blind.

What bends it: constants drawn about the table's, more of them than the tuner corrects; time that
copies and host threads take from the thread that drives the device, which is in no lane's spans;
an error of each setting's own, next to which no other setting's tells anything; steps that vary,
and now and then one that is far too long. The shape of the energy curve is drawn too.

What is not bent: how a delay counts against a step (`autotune.efficiency`). That defines goodput,
and no stretch of steps can measure it, so no method could learn another one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from autotune.efficiency import FITTED, EnergyCurve
from autotune.model.stretch import Stretch, robust_mean
from autotune.model.twin import NEUTRAL, Forecast, Twin
from autotune.online.stretches import stretch_steps
from sim.hardware.catalog import find_machine
from sim.hardware.profile import HardwareProfile
from sim.models.table import find_model
from sim.models.workload import Workload
from zenflow.config import ZenFlowConfig
from zenflow.knobs import Knobs

SIGMA = 0.35
"""Standard deviation of the hidden constants' logarithms: as wrong as a table entry may be."""
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
"""Figures that differ from the table's, each by a factor of its own."""

_CONTENTION = (0.02, 0.15)
"""Range of a step's relative excess where copies and host threads are busy throughout."""
_CURVE_POWER = (0.25, 0.75)
"""Range of the power p in share = ratio^p, the energy that the best columns hold."""
_CURVE_RATIOS = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5)
_SETTING_ERROR = 0.02
"""Standard deviation of each setting's own log error."""
_STEP_NOISE = 0.02
_SPIKE_SHARE = 0.02
"""Share of the steps that something else hits."""
_SPIKE_SCALE = 0.3
"""Scale of what hits them, in steps."""
_SPIKE_SHAPE = 1.5
"""Shape of the Pareto distribution of what hits them: it has no finite variance."""
_PART_NOISE = 0.04
"""Relative noise of each part's busy seconds, drawn anew in each stretch."""
_RHO_NOISE = 0.02

CONFIG = ZenFlowConfig()
"""Configuration that every method starts from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A training, as everybody knows it."""

    model: str
    machine: str
    num_sequences: int
    """Number of sequences of 1024 tokens in a batch."""

    @property
    def workload(self) -> Workload:
        """Model and batch; activations are recomputed."""
        return Workload.of_config(
            *find_model(self.model),
            batch_size=self.num_sequences,
            sequence=1024,
            checkpointing=True,
        )

    @property
    def profile(self) -> HardwareProfile:
        """The machine as the table has it."""
        return find_machine(self.machine, 1)

    def __str__(self) -> str:
        return f"{self.model} on {self.machine}, {self.num_sequences} sequences"


# By the table the default setting is bound by compute, by link and host, by the host's memory: a
# host of 64 GB has no room for a 7B model's states.
CASES = (
    Case(model="llama-2-7b", machine="dgx-a100-80", num_sequences=4),
    Case(model="llama-2-7b", machine="dgx-a100-80", num_sequences=1),
    Case(model="llama-3.2-3b", machine="rtx4090-desktop", num_sequences=2),
)


def case_of(seed: int) -> Case:
    """Return the case that a seed belongs to; they take turns."""
    return CASES[seed % len(CASES)]


@dataclass(slots=True)
class HiddenMachine:
    """One draw of the truth about a case.

    Attributes:
        seed: Of the draw, of the noise, and of the case.
        drift: Factor on the seconds of both directions of the link; tests and studies change it.
        curve: Energy by ratio of columns.
    """

    seed: int
    drift: float = 1.0
    curve: EnergyCurve = field(init=False)
    _simulated: Twin = field(init=False)
    _contention: float = field(init=False)
    _noise: np.random.Generator = field(init=False)
    _num_measured: int = 0
    _num_steps: int = 0

    def __post_init__(self) -> None:
        """Draw everything that is hidden."""
        rng = np.random.default_rng(self.seed)
        case = case_of(self.seed)
        figures = case.profile.quantities()
        values = {
            name: figures[name].value * math.exp(SIGMA * rng.standard_normal())
            for name in HIDDEN
            if name in figures
        }
        profile = case.profile.with_values(values)
        self._simulated = Twin(case.workload, profile, CONFIG)
        self._contention = rng.uniform(*_CONTENTION)
        power = rng.uniform(*_CURVE_POWER)
        self.curve = EnergyCurve.of({ratio: ratio**power for ratio in _CURVE_RATIOS})
        self._noise = np.random.default_rng([self.seed, 1])

    def afresh(self) -> HiddenMachine:
        """Return the machine before anything was measured; simulations are kept."""
        other = HiddenMachine(self.seed)
        other._simulated = self._simulated
        return other

    def step_seconds(self, knobs: Knobs) -> float:
        """Return the seconds of a step without noise, selections aside."""
        forecast = self._forecast(knobs)
        busy, step = forecast.busy_seconds, forecast.step_seconds
        copies, host = (busy["d2h"] + busy["h2d"]) / step, busy["host"] / step
        driven = step * (1 + self._contention * copies * host)
        return driven * math.exp(_SETTING_ERROR * self._own_error(knobs))

    def progress(self, knobs: Knobs) -> float:
        """Return goodput without noise: steps of AdamW's worth per second."""
        rho = 1.0 - self.curve.captured(knobs.topk_ratio)
        return FITTED.of(knobs, rho) / self.step_seconds(knobs)

    def truth(self, settings: Iterable[Knobs]) -> dict[Knobs, float]:
        """Return the goodput of each setting; some seconds for a hundred of them."""
        return {knobs: self.progress(knobs) for knobs in settings}

    def measure(self, knobs: Knobs) -> Stretch:
        """Return an engine's measurement of a stretch of steps."""
        count = stretch_steps(knobs)
        mean, noise = robust_mean(self._step_times(knobs, count), knobs.update_interval)
        busy = {
            part: seconds * math.exp(_PART_NOISE * self._noise.standard_normal())
            for part, seconds in self._forecast(knobs).busy_seconds.items()
        }
        captured = self.curve.captured(knobs.topk_ratio)
        captured *= math.exp(_RHO_NOISE * self._noise.standard_normal())
        self._num_measured += 1
        self._num_steps += count
        return Stretch(
            index=self._num_measured - 1,
            last_step=self._num_steps,
            knobs=knobs,
            step_seconds=mean,
            noise=noise,
            stall_seconds=max(0.0, mean - busy["device"] - busy["step"]),
            rho=1.0 - min(0.999, captured),
            busy_seconds=busy,
        )

    def _step_times(self, knobs: Knobs, count: int) -> list[float]:
        """Return a stretch's step times with everything that disturbs them, seconds."""
        step = self.step_seconds(knobs)
        seconds = step * np.exp(_STEP_NOISE * self._noise.standard_normal(count))
        is_hit = self._noise.random(count) < _SPIKE_SHARE
        seconds += is_hit * _SPIKE_SCALE * step * self._noise.pareto(_SPIKE_SHAPE, count)
        return [float(value) for value in seconds]

    def _forecast(self, knobs: Knobs) -> Forecast:
        return self._simulated.forecast(knobs, {**NEUTRAL, "d2h": self.drift, "h2d": self.drift})

    def _own_error(self, knobs: Knobs) -> float:
        """Return a number from a standard normal distribution that belongs to the setting."""
        digest = hashlib.sha256(f"{self.seed} {knobs}".encode()).digest()
        return float(np.random.default_rng(list(digest[:8])).standard_normal())
