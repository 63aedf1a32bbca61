"""Advice: refit the twin, search it, and say what is worth trying. A pure function. No torch.

It runs in a process of its own (`autotune.background`), so a question and its answer are plain
records.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import optuna

from autotune.constraints import Constraints, Feasibility, Need, needs_of
from autotune.efficiency import FITTED, DelayCost, EnergyCurve
from autotune.measured import Stretch, spread_between
from autotune.refit import Prior, refit
from autotune.residual import Evidence, Residual
from autotune.space import SearchSpace, effective_lag
from autotune.twin import LANES, Constants, Twin
from zenflow.knobs import Knobs

_RISK = 2.0
"""Errors by which the worst case of a candidate is worse than its prediction."""
_WORST = 1.25
"""Most that a candidate's worst case may take per unit of progress, in terms of the default's."""
_LEAST_GAIN = 0.005
"""Log of a goodput that is worth a change."""
_LEAST_PROMISE = 0.004
"""Expected improvement from which on a trial is worth its trouble."""
_CHECKED = 3
"""Candidates whose error is worked out in full where nothing has been measured yet."""


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
    may_probe: bool = True
    """Whether a setting may be tried whose gain the prediction's error exceeds."""
    num_trials: int = 40
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


@dataclass(slots=True)
class Adviser:
    """Answers questions on one workload and machine."""

    twin: Twin
    space: SearchSpace = field(default_factory=SearchSpace)
    constraints: Constraints = field(default_factory=Constraints)
    cost: DelayCost = FITTED
    _need: Callable[[Knobs], Need] | None = None

    def start(self, wanted: Knobs) -> Knobs:
        """Return the setting to start from: the wanted one, or the nearest that is allowed.

        Raises:
            ConfigError: No setting keeps all constraints.
        """
        feasibility = self.feasibility(None)
        feasibility.check()
        wanted = replace(wanted, lag=effective_lag(wanted))
        if feasibility.allows(wanted):
            return wanted
        allowed = [knobs for knobs in self.space.grid() if feasibility.allows(knobs)]
        return min(allowed, key=lambda knobs: (_distance(knobs, wanted), str(knobs)))

    def feasibility(self, curve: EnergyCurve | None) -> Feasibility:
        """Return which settings keep the constraints.

        Args:
            curve: Energy by ratio of columns; None while it is unknown.
        """
        if self._need is None:  # memory is known once for all questions, energy is not
            self._need = needs_of(self.twin.workload, self.twin.profile, base=self.twin.config)
        memory = self._need

        def need(knobs: Knobs) -> Need:
            captured = None if curve is None else curve.captured(knobs.topk_ratio)
            return replace(memory(knobs), captured=captured)

        return Feasibility(self.constraints, need, self.space)

    def seconds_per_forecast(self) -> float:
        """Return the CPU time of one simulation, of the settings at the middle of the space."""
        started = time.process_time()
        settings = list(self.space.grid())
        self.twin.forecast(settings[len(settings) // 2])
        return time.process_time() - started

    def advise(self, question: Question) -> Advice:
        """Refit, search, and weigh what was found.

        Raises:
            ConfigError: No setting keeps all constraints.
        """
        started = time.process_time()
        before = self.twin.num_simulated
        view = _View.of(self, question)
        found = view.search()
        advice = view.weigh(found)
        return replace(
            advice,
            num_simulated=self.twin.num_simulated - before,
            seconds=time.process_time() - started,
        )


@dataclass(slots=True)
class _View:
    """One question with the constants and the residual that answer it."""

    adviser: Adviser
    question: Question
    feasibility: Feasibility
    constants: Constants
    residual: Residual
    select_seconds: float

    @classmethod
    def of(cls, adviser: Adviser, question: Question) -> _View:
        twin = adviser.twin
        feasibility = adviser.feasibility(question.curve if question.stretches else None)
        feasibility.check()
        constants = refit(twin, question.stretches, question.prior)
        select = question.select_seconds
        if select is None:
            select = twin.selection_seconds(question.here, constants)
        return cls(
            adviser=adviser,
            question=question,
            feasibility=feasibility,
            constants=constants,
            residual=Residual(_evidence(twin, question.stretches, constants)),
            select_seconds=select,
        )

    def search(self) -> list[Outlook]:
        """Return what a study over the corrected twin has looked at, each setting once."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        question, space = self.question, self.adviser.space
        sampler = optuna.samplers.TPESampler(seed=question.seed, n_startup_trials=8)
        study = optuna.create_study(direction="maximize", sampler=sampler)
        promising = self._promising()
        for knobs in promising[: max(1, question.num_trials * 2 // 3)]:
            study.enqueue_trial(space.indices_of(knobs))
        found: dict[Knobs, Outlook] = {}
        for _ in range(question.num_trials):
            trial = study.ask()
            every = question.here.select_interval  # what suits a setting is worked out for each
            knobs = replace(space.suggest_indices(trial), select_interval=every)
            if knobs not in found:
                if not self.feasibility.allows(knobs):
                    study.tell(trial, state=optuna.trial.TrialState.PRUNED)
                    continue
                found[knobs] = self.outlook(knobs)
            study.tell(trial, found[knobs].gain)
        return list(found.values())

    def weigh(self, found: Sequence[Outlook]) -> Advice:
        """Return the advice that follows from the settings looked at."""
        # As they are: another ``select_interval`` would be another setting.
        here, start = self._outlook(self.question.here), self._outlook(self.question.start)
        if not self.question.stretches:
            found = self._with_full_errors(found)
        floor = start.progress / _WORST
        safe = [o for o in found if o.progress * math.exp(-_RISK * o.error) > floor]
        worth = {o: value for o in safe if (value := self._value(o)) > 0}
        stretches = [s for s in self.question.stretches if s.knobs == self.question.here]
        forecast = self.adviser.twin.forecast(self.question.here, self.constants)
        last = stretches[-1].step_seconds if stretches else forecast.step_seconds
        best = max(worth, key=worth.__getitem__, default=None)
        must_move = not self.feasibility.allows(self.question.here)
        if must_move and best is None:
            best = max(found, key=lambda o: o.gain, default=None)
        return Advice(
            constants=self.constants,
            here=here,
            best=best,
            must_move=must_move,
            peak=max([*found, here], key=lambda o: o.gain),
            intervals=self._intervals(here, found),
            error=math.log(forecast.step_seconds / last),
            num_simulated=0,
            seconds=0.0,
        )

    def _value(self, outlook: Outlook) -> float:
        """Return what trying a setting for a stretch, and keeping it if it is better, promises.

        In stretches' worth of goodput; 0 or less if it is not to be tried.
        """
        is_adopted = outlook.gain > max(outlook.error, _LEAST_GAIN)
        if not is_adopted and not (self.question.may_probe and self.question.stretches):
            return 0.0
        improvement = _expected_improvement(outlook.gain, outlook.error)
        if improvement < _LEAST_PROMISE:
            return 0.0
        loss = improvement - outlook.gain
        left = min(self.question.stretches_left, 1e6) - 1.0
        return improvement * left - loss - self._change(outlook, comes_back=not is_adopted)

    def _change(self, outlook: Outlook, *, comes_back: bool) -> float:
        """Return what going to a setting costs by itself, in stretches: a change of k stalls."""
        question = self.question
        if outlook.knobs.topk_ratio == question.here.topk_ratio:
            return 0.0
        forecast = self.adviser.twin.forecast(question.here, self.constants)
        seconds = question.resize_seconds
        if seconds is None:  # every block's update at once, and its upload
            busy = forecast.busy_seconds
            whole = busy.get("host", 0.0) + busy.get("h2d", 0.0)
            seconds = question.here.update_interval * whole
        stretch = question.steps_per_stretch * forecast.step_seconds
        return (2 if comes_back else 1) * seconds / stretch

    def _with_full_errors(self, found: Sequence[Outlook]) -> list[Outlook]:
        """Return the best candidates with what the prior's spread makes of their gains.

        Measured spans fix the constants; before there are any, a gain is as uncertain as they are.
        """
        best = sorted(found, key=lambda o: -o.gain)[:_CHECKED]
        return [replace(o, error=math.hypot(o.error, self._spread(o))) for o in best]

    def _spread(self, outlook: Outlook) -> float:
        twin, here = self.adviser.twin, self.question.here

        def gain(constants: Constants) -> float:
            step = twin.forecast(outlook.knobs, constants).step_seconds
            return math.log(twin.forecast(here, constants).step_seconds / step)

        factor = math.exp(self.question.prior.sigma)
        moved = (gain({**self.constants, lane: self.constants[lane] * factor}) for lane in LANES)
        return math.hypot(*(value - gain(self.constants) for value in moved))

    def outlook(self, knobs: Knobs) -> Outlook:
        """Return a setting's prospects, with the ``select_interval`` that suits it."""
        choices = [knobs]
        if self.question.energy_decay is not None:
            choices = [
                replace(knobs, select_interval=interval)
                for interval in self.adviser.space.select_intervals
            ]
        return max((self._outlook(choice) for choice in choices), key=lambda o: o.gain)

    def _outlook(self, knobs: Knobs) -> Outlook:
        here = self.question.here
        step, efficiency = self._step(knobs), self._efficiency(knobs)
        gain = math.log(self._step(here) / step)
        gain += math.log(efficiency / self._efficiency(here))
        return Outlook(
            knobs=knobs,
            step_seconds=step,
            efficiency=efficiency,
            gain=gain,
            error=self.residual.error(knobs, here) if knobs != here else 0.0,
        )

    def _step(self, knobs: Knobs) -> float:
        forecast = self.adviser.twin.forecast(knobs, self.constants)
        step = forecast.step_seconds * math.exp(self.residual.mean(knobs))
        every = knobs.select_interval
        return step + (self.select_seconds / every if every else 0.0)

    def _efficiency(self, knobs: Knobs) -> float:
        captured = self.question.curve.captured(knobs.topk_ratio)
        decay = self.question.energy_decay or 0.0
        longer = knobs.select_interval - self.question.here.select_interval
        captured -= decay * longer / 2  # the mean age of a selection is half the interval
        return self.adviser.cost.of(knobs, 1.0 - min(1.0, max(0.0, captured)))

    def _promising(self) -> list[Knobs]:
        """Return settings by an optimistic bound on their goodput, the best first.

        No step is shorter than its busiest lane, and what a lane carries is known in proportion:
        so a few simulations, of those with the best bounds, do the work of many.
        """
        here = self.question.here
        busy = self.adviser.twin.forecast(here, self.constants).busy_seconds

        def bound(knobs: Knobs) -> float:
            lanes = [busy.get("device", 0.0)]
            lanes += [
                busy.get(lane, 0.0) * self._load(lane, knobs) / max(self._load(lane, here), 1e-12)
                for lane in ("d2h", "h2d", "host")
            ]
            return math.log(self._efficiency(knobs)) - math.log(max(lanes))

        settings = {
            replace(knobs, select_interval=here.select_interval)
            for knobs in self.adviser.space.grid()
        }
        ranked = sorted(settings, key=lambda k: (-bound(k), str(k)))
        allowed = (knobs for knobs in ranked if self.feasibility.allows(knobs))
        return list(islice(allowed, self.question.num_trials))

    def _load(self, lane: str, knobs: Knobs) -> float:
        """Return what a lane carries per step and parameter, in units of its own."""
        interval, deferred = knobs.update_interval, 1.0 - knobs.topk_ratio
        if lane == "d2h":
            return deferred
        if lane == "h2d":
            return deferred / interval
        each = 18.0 if self.adviser.twin.config.deferred_moments == "step" else 10.0
        return deferred * (each * (interval - 1) + 28.0) / interval

    def _intervals(self, here: Outlook, found: Sequence[Outlook]) -> tuple[int, int]:
        """Return the range of S that costs next to nothing beside the best seen, about here."""
        every = here.knobs.select_interval  # S moves alone
        looked_at = {replace(o.knobs, select_interval=every) for o in found}
        same = {
            knobs.update_interval: self._outlook(knobs).gain
            for knobs in looked_at
            if replace(knobs, update_interval=1) == replace(here.knobs, update_interval=1)
        }
        same[here.knobs.update_interval] = here.gain
        known = sorted(same)
        at = known.index(here.knobs.update_interval)
        low = high = at
        while low > 0 and same[known[low - 1]] >= here.gain - 2 * _LEAST_GAIN:
            low -= 1
        while high + 1 < len(known) and same[known[high + 1]] >= here.gain - 2 * _LEAST_GAIN:
            high += 1
        return known[low], known[high]


def _distance(one: Knobs, other: Knobs) -> float:
    """Return how far two settings are apart: factors of two, and 1 for the kind of window."""
    pairs = (
        (one.topk_ratio, other.topk_ratio),
        (one.update_interval, other.update_interval),
        (effective_lag(one), effective_lag(other)),
        (max(one.select_interval, 1), max(other.select_interval, 1)),
    )
    apart = sum(abs(math.log2(max(a, 1e-3) / max(b, 1e-3))) for a, b in pairs)
    return apart + (one.rolling != other.rolling)


def _expected_improvement(gain: float, error: float) -> float:
    """Return E[max(0, x)] for x Gaussian about ``gain``."""
    if error <= 0:
        return max(0.0, gain)
    scaled = gain / error
    density = math.exp(-scaled * scaled / 2) / math.sqrt(2 * math.pi)
    return gain * 0.5 * (1 + math.erf(scaled / math.sqrt(2))) + error * density


def _evidence(twin: Twin, stretches: Sequence[Stretch], constants: Constants) -> list[Evidence]:
    """Return each stretch beside its prediction."""
    newest = stretches[-1].index if stretches else 0
    between = spread_between(stretches)
    return [
        Evidence(
            knobs=s.knobs,
            log_ratio=math.log(s.step_seconds / twin.forecast(s.knobs, constants).step_seconds),
            noise=max(s.noise, between),
            age=newest - s.index,
        )
        for s in stretches
    ]
