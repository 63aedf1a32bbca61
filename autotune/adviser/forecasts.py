"""Forecasts: any setting's goodput by the refitted twin, its residual and efficiency."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autotune.adviser.messages import ForecastedSetting, Question
from autotune.efficiency import FITTED
from autotune.model.refit import refit
from autotune.model.residual import Residual
from autotune.model.speed_noise import SpeedNoise
from autotune.model.twin import PARTS, Constants, Forecast, Twin
from zenflow.knobs import Knobs


@dataclass(slots=True)
class Forecasts:
    """Predictions of settings from one question's evidence.

    ``dataclasses.replace`` with another question weighs the settings anew, by the newer evidence
    and with unchanged constants.
    """

    question: Question
    """The question, with the evidence."""
    twin: Twin
    """Simulator that the evidence is compared with."""
    constants: Constants
    """Constants as refitted to the evidence."""
    _select_intervals: Sequence[int]
    _select_seconds: float
    speed_noise: SpeedNoise = field(init=False)
    """Noise of the machine's own speed, as the evidence shows it."""
    _residual: Residual = field(init=False)

    def __post_init__(self) -> None:
        """Compare each stretch with its prediction."""
        stretches = self.question.stretches
        self.speed_noise = SpeedNoise.of(stretches)
        ratios = [
            math.log(s.step_seconds / self.forecast(s.knobs).step_seconds) for s in stretches
        ]
        self._residual = Residual(stretches, ratios, self.speed_noise)

    @classmethod
    def of(cls, question: Question, twin: Twin, select_intervals: Sequence[int]) -> Forecasts:
        """Refit the twin to a question's evidence."""
        constants = refit(twin, question.stretches, question.prior)
        seconds = question.select_seconds
        if seconds is None:
            seconds = twin.selection_seconds(question.here, constants)
        return cls(question, twin, constants, select_intervals, seconds)

    def forecast(self, knobs: Knobs) -> Forecast:
        """Return the refitted twin's prediction, without the residual's correction."""
        return self.twin.forecast(knobs, self.constants)

    def setting(self, knobs: Knobs) -> ForecastedSetting:
        """Return the forecast of a setting, with the ``select_interval`` that suits it."""
        choices = [knobs]
        if self.question.energy_decay is not None:
            choices = [replace(knobs, select_interval=every) for every in self._select_intervals]
        return max((self.as_it_is(choice) for choice in choices), key=lambda o: o.gain)

    def as_it_is(self, knobs: Knobs) -> ForecastedSetting:
        """Return the forecast of a setting with its own ``select_interval``."""
        here = self.question.here
        step, efficiency = self._step(knobs), self.efficiency(knobs)
        gain = math.log(self._step(here) / step)
        gain += math.log(efficiency / self.efficiency(here))
        return ForecastedSetting(
            knobs=knobs,
            step_seconds=step,
            efficiency=efficiency,
            gain=gain,
            error=self._residual.error(knobs, here) if knobs != here else 0.0,
            busy_seconds=self.forecast(knobs).busy_seconds,
        )

    def _step(self, knobs: Knobs) -> float:
        forecast = self.forecast(knobs)
        step = forecast.step_seconds * math.exp(self._residual.mean(knobs))
        every = knobs.select_interval
        return step + (self._select_seconds / every if every else 0.0)

    def efficiency(self, knobs: Knobs) -> float:
        """Return the worth of a step, in steps of AdamW."""
        captured = self.question.curve.captured(knobs.topk_ratio)
        decay = self.question.energy_decay or 0.0
        longer = knobs.select_interval - self.question.here.select_interval
        captured -= decay * longer / 2  # the mean age of a selection is half the interval
        return FITTED.of(knobs, 1.0 - min(1.0, max(0.0, captured)))

    def spread(self, setting: ForecastedSetting) -> float:
        """Return the error of a gain that the prior's spread of the constants causes."""
        twin, here = self.twin, self.question.here

        def gain(constants: Constants) -> float:
            step = twin.forecast(setting.knobs, constants).step_seconds
            return math.log(twin.forecast(here, constants).step_seconds / step)

        factor = math.exp(self.question.prior.sigma)
        moved = (gain({**self.constants, part: self.constants[part] * factor}) for part in PARTS)
        return math.hypot(*(value - gain(self.constants) for value in moved))
