"""A question to the tuner's adviser, and its answer: records that cross processes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from autotune.efficiency import EnergyCurve
from autotune.model.refit import Prior
from autotune.model.stretch import Stretch
from autotune.model.twin import Constants
from zenflow.knobs import Knobs

SIGMAS_TO_BELIEVE = 2.0
"""Number of standard errors that count as proof.

- A setting tried without a confident prediction stays only if it measures better by this much.
- A setting that lost a trial is tried again only if it is predicted better by this much.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Evidence and limits on which the adviser answers. See `autotune.adviser.adviser.Adviser`."""

    stretches: tuple[Stretch, ...]
    """Measured stretches since the last drift, in order."""
    here: Knobs
    """Knobs in force when the question is asked."""
    start: Knobs
    """Default setting, which nothing tried may be much worse than."""
    curve: EnergyCurve
    """Energy by ratio of columns, as measured at the knobs in force."""
    has_curve: bool = False
    """Whether ``curve`` was measured: until then it rules nothing out."""
    prior: Prior
    """Prior of the twin's constants."""
    select_seconds: float | None = None
    """Measured seconds of one selection; None takes the simulator's."""
    energy_decay: float | None = None
    """Captured share that a step since the last selection costs.

    None while it is unknown: ``select_interval`` then stays."""
    stretches_left: float = math.inf
    """Number of stretches in which a better setting would pay."""
    steps_per_stretch: int = 16
    """Number of steps of a stretch at the knobs in force."""
    resize_seconds: float | None = None
    """Measured stall of a change of ``topk_ratio``, seconds; None takes the simulator's lanes."""
    leaves_interval: bool = False
    """Whether another controller moves S among equally good values: S alone is then left to it."""
    may_probe: bool = True
    """Whether a setting may be tried whose gain the prediction's error exceeds."""
    barred: frozenset[Knobs] = frozenset()
    """Settings that lost a trial of late, with a ``select_interval`` of 0.

    These settings, and similar ones, are tried again only if predicted to be better by
    `SIGMAS_TO_BELIEVE` errors."""
    num_trials: int = 40
    """Number of settings to simulate; 0 weighs the last search's settings anew."""
    most_seconds: float = math.inf
    """CPU seconds after which no trial is begun: a search ends early rather than take more."""
    seed: int = 0
    """Seed of the search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastedSetting:
    """A setting with its predicted speed, efficiency and gain.

    See `autotune.adviser.adviser.Adviser`.
    """

    knobs: Knobs
    """Setting that is predicted."""
    step_seconds: float
    """Predicted seconds of a step, corrected by the residual, selections included."""
    efficiency: float
    """Worth of a step, in steps of AdamW."""
    gain: float
    """Logarithm of the setting's goodput over that of the knobs in force."""
    error: float
    """Standard deviation of ``gain``."""
    busy_seconds: Mapping[str, float] = field(default_factory=dict, compare=False)
    """Predicted seconds of work of each part of the twin, per step."""

    @property
    def progress(self) -> float:
        """Progress per second, in steps of AdamW."""
        return self.efficiency / self.step_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The adviser's answer: a setting to try, if any. See `autotune.adviser.adviser.Adviser`."""

    constants: Constants
    """Constants of the twin as refitted."""
    here: ForecastedSetting
    """Forecast of the knobs in force."""
    best: ForecastedSetting | None
    """Setting worth trying; None if nothing promises more than its error."""
    must_move: bool
    """Whether the knobs in force break a constraint, now that more is known."""
    peak: ForecastedSetting
    """Setting with the largest expected goodput, whatever its error."""
    intervals: tuple[int, int]
    """Range of S about ``here``'s in which expected goodput is practically equal."""
    error: float
    """Log of predicted over measured step time at the knobs in force, before the residual."""
    num_simulated: int = 0
    """Number of simulations that the answer took."""
    seconds: float = 0.0
    """CPU seconds that the answer took."""
