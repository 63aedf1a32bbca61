"""Forecasts: any setting's goodput as the refitted twin, the residual and efficiency see it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autotune.adviser.messages import ForecastedSetting, Question
from autotune.efficiency import DelayCost
from autotune.model.refit import refit
from autotune.model.residual import Evidence, Residual
from autotune.model.speed_noise import SpeedNoise
from autotune.model.stretch import Stretch
from autotune.model.twin import PARTS, Constants, Forecast, Twin
from zenflow.knobs import Knobs


@dataclass(slots=True)
class Forecasts:
    """What one question's evidence says of settings.

    Attributes:
        question: The question, with the evidence.
        twin: The simulator.
        constants: Constants as refitted to the evidence.
        speed_noise: How the machine's speed moves by itself, as the evidence shows it.
    """

    question: Question
    twin: Twin
    constants: Constants
    speed_noise: SpeedNoise
    _cost: DelayCost
    _select_intervals: Sequence[int]
    _residual: Residual
    _select_seconds: float

    @classmethod
    def of(
        cls, question: Question, twin: Twin, cost: DelayCost, select_intervals: Sequence[int]
    ) -> Forecasts:
        """Refit the twin to a question's evidence.

        Args:
            question: What is known.
            twin: Of the workload and machine.
            cost: How a delay counts.
            select_intervals: Those to choose from.
        """
        constants = refit(twin, question.stretches, question.prior)
        seconds = question.select_seconds
        if seconds is None:
            seconds = twin.selection_seconds(question.here, constants)
        speed_noise = SpeedNoise.of(question.stretches)
        return cls(
            question=question,
            twin=twin,
            constants=constants,
            speed_noise=speed_noise,
            _cost=cost,
            _select_intervals=select_intervals,
            _residual=_residual(twin, question.stretches, constants, speed_noise),
            _select_seconds=seconds,
        )

    def weighed_anew(self, question: Question) -> Forecasts:
        """Return the forecasts by newer evidence, with the constants as they are."""
        speed_noise = SpeedNoise.of(question.stretches)
        residual = _residual(self.twin, question.stretches, self.constants, speed_noise)
        return replace(self, question=question, speed_noise=speed_noise, _residual=residual)

    def forecast(self, knobs: Knobs) -> Forecast:
        """Return what the refitted twin says by itself."""
        return self.twin.forecast(knobs, self.constants)

    def setting(self, knobs: Knobs) -> ForecastedSetting:
        """Return the forecast of a setting, with the ``select_interval`` that suits it."""
        choices = [knobs]
        if self.question.energy_decay is not None:
            choices = [
                replace(knobs, select_interval=interval) for interval in self._select_intervals
            ]
        return max((self.as_it_is(choice) for choice in choices), key=lambda o: o.gain)

    def as_it_is(self, knobs: Knobs) -> ForecastedSetting:
        """Return the forecast of a setting with the ``select_interval`` that it has."""
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
        )

    def _step(self, knobs: Knobs) -> float:
        forecast = self.forecast(knobs)
        step = forecast.step_seconds * math.exp(self._residual.mean(knobs))
        every = knobs.select_interval
        return step + (self._select_seconds / every if every else 0.0)

    def efficiency(self, knobs: Knobs) -> float:
        """Return what a step is worth beside one of AdamW."""
        captured = self.question.curve.captured(knobs.topk_ratio)
        decay = self.question.energy_decay or 0.0
        longer = knobs.select_interval - self.question.here.select_interval
        captured -= decay * longer / 2  # the mean age of a selection is half the interval
        return self._cost.of(knobs, 1.0 - min(1.0, max(0.0, captured)))

    def spread(self, setting: ForecastedSetting) -> float:
        """Return what the prior's spread of the constants makes of a gain's error."""
        twin, here = self.twin, self.question.here

        def gain(constants: Constants) -> float:
            step = twin.forecast(setting.knobs, constants).step_seconds
            return math.log(twin.forecast(here, constants).step_seconds / step)

        factor = math.exp(self.question.prior.sigma)
        moved = (gain({**self.constants, part: self.constants[part] * factor}) for part in PARTS)
        return math.hypot(*(value - gain(self.constants) for value in moved))


def _residual(
    twin: Twin, stretches: Sequence[Stretch], constants: Constants, speed_noise: SpeedNoise
) -> Residual:
    """Return what each stretch beside its prediction says of the others."""
    evidence = [
        Evidence(
            knobs=s.knobs,
            log_ratio=math.log(s.step_seconds / twin.forecast(s.knobs, constants).step_seconds),
            noise=speed_noise.noise_of(s),
            time=s.index,
        )
        for s in stretches
    ]
    return Residual(evidence, speed_noise)
