"""A question to the tuner's adviser, and its answer: records that cross processes. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autotune.efficiency import EnergyCurve
from autotune.model.refit import Prior
from autotune.model.stretch import Stretch
from autotune.model.twin import Constants
from zenflow.knobs import Knobs

PROOF = 2.0
"""Standard errors by which a setting that was only tried must be better to stay, and one that did
not show it must be predicted to be better to be tried again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is known when advice is asked for."""

    stretches: tuple[Stretch, ...]
    """Since the last drift, in order."""
    here: Knobs
    """In force."""
    start: Knobs
    """The default, which nothing tried may be much worse than."""
    curve: EnergyCurve
    """As measured at the knobs in force."""
    has_curve: bool = False
    """Whether ``curve`` was measured: until then it rules nothing out."""
    prior: Prior
    select_seconds: float | None = None
    """Of one selection, as measured; None is what the simulator says."""
    energy_decay: float | None = None
    """Captured share that a step since the last selection costs; None while it is unknown, and
    ``select_interval`` then stays."""
    stretches_left: float = math.inf
    """In which a better setting would pay."""
    steps_per_stretch: int = 16
    resize_seconds: float | None = None
    """Stall of a change of ``topk_ratio``, as measured; None is what the simulator's lanes say."""
    leaves_interval: bool = False
    """Whether another controller moves S within what is as good: S alone is then left to it."""
    may_probe: bool = True
    """Whether a setting may be tried whose gain the prediction's error exceeds."""
    barred: frozenset[Knobs] = frozenset()
    """Settings that were tried and lost of late, ``select_interval`` aside as 0: they are not
    tried again but for a gain that exceeds its error."""
    num_trials: int = 40
    """0 simulates nothing: what the last search saw is weighed anew by what has been measured."""
    most_seconds: float = math.inf
    """CPU time after which no trial is begun: a search ends early rather than take more."""
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """A setting as the corrected twin sees it."""

    knobs: Knobs
    step_seconds: float
    """Predicted, corrected by the residual, selections included."""
    efficiency: float
    gain: float
    """Log of its goodput over that of the knobs in force."""
    error: float
    """Standard deviation of ``gain``."""

    @property
    def progress(self) -> float:
        """Steps of AdamW's worth per second."""
        return self.efficiency / self.step_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The answer."""

    constants: Constants
    here: Outlook
    best: Outlook | None
    """Worth trying; None if nothing promises more than its error."""
    must_move: bool
    """Whether the knobs in force break a constraint, now that more is known."""
    peak: Outlook
    """With the largest expected goodput, whatever its error."""
    intervals: tuple[int, int]
    """Range of S about ``here``'s in which expected goodput is as good as equal."""
    error: float
    """Log of predicted over measured step time at the knobs in force, before the residual."""
    num_simulated: int
    seconds: float
    """CPU time."""
