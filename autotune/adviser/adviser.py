"""Advice: refit the twin to the evidence, search it, and name the setting that is worth trying.

The adviser runs in a process of its own (`autotune.adviser.process`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from autotune.adviser.forecasts import Forecasts
from autotune.adviser.messages import SIGMAS_TO_BELIEVE, Advice, ForecastedSetting, Question
from autotune.adviser.search import search, update_share
from autotune.constraints import Constraints, Feasibility, Need, needs_of
from autotune.efficiency import EnergyCurve
from autotune.model.residual import distance
from autotune.model.twin import Twin
from autotune.space import SearchSpace
from zenflow.knobs import Knobs

_RISK = 2.0
"""Number of errors by which the worst case of a candidate is worse than its prediction."""
_WORST = 1.25
"""Largest time per unit of progress of a candidate's worst case, in terms of the default's."""
_LEAST_GAIN = 0.005
"""Least gain, a logarithm of goodput, that is worth a change."""
_AS_GOOD = 2 * _LEAST_GAIN
"""Largest loss, a logarithm of goodput, with which another S still counts as equally good."""
_LEAST_SELECT_GAIN = 0.001
"""Least gain that is worth selecting more or less often: nothing stalls by that change."""
_ALIKE = 0.5
"""Distance of settings below which one that lost speaks for another.

In the residual's coordinates S four times as large is at 1, and so is k 4.5 times as large."""
_LEAST_PROMISE = 0.004
"""Expected improvement from which on a trial is worth its trouble."""
_CHECKED = 3
"""Number of candidates whose error is worked out in full where nothing has been measured yet."""


@dataclass(slots=True)
class Adviser:
    """Proposes settings for one workload on one machine, from measured stretches.

    Examples:
        A first question, with nothing measured yet:

        >>> from autotune.model.refit import Prior
        >>> from autotune.model.twin import NEUTRAL
        >>> from sim.hardware.catalog import find_machine
        >>> from sim.models.table import find_model
        >>> from sim.models.workload import Workload
        >>> from zenflow.config import ZenFlowConfig
        >>> workload = Workload.of_config(*find_model("gpt2"))
        >>> machine = find_machine("rtx3090-desktop")
        >>> twin = Twin(workload, machine, ZenFlowConfig(update_interval=1))
        >>> adviser = Adviser(twin)
        >>> here = adviser.start(Knobs.of(twin.config))
        >>> advice = adviser.advise(Question(
        ...     stretches=(), here=here, start=here, curve=EnergyCurve.default(),
        ...     prior=Prior(NEUTRAL, sigma=0.1), num_trials=4))
        >>> advice.peak.knobs.update_interval > here.update_interval
        True
    """

    twin: Twin
    space: SearchSpace = field(default_factory=SearchSpace)
    constraints: Constraints = field(default_factory=Constraints)
    _need: Callable[[Knobs], Need] | None = None
    _seen: tuple[Forecasts, tuple[Knobs, ...]] | None = None
    """Forecasts of the last search, and the settings that it looked at."""

    def __reduce__(self) -> tuple[type[Adviser], tuple[object, ...]]:
        """Pickle what it was made of; what it has worked out is worked out again."""
        return Adviser, (self.twin, self.space, self.constraints)

    def start(self, wanted: Knobs) -> Knobs:
        """Return the setting to start from: the wanted one, or the nearest that is allowed.

        Raises:
            ConfigError: No setting keeps all constraints.
        """
        feasibility = self.feasibility(None)
        feasibility.check()
        if feasibility.allows(wanted):
            return wanted
        allowed = [knobs for knobs in self.space.grid() if feasibility.allows(knobs)]
        return min(allowed, key=lambda knobs: (_distance(knobs, wanted), str(knobs)))

    def feasibility(self, curve: EnergyCurve | None) -> Feasibility:
        """Return the settings that keep the constraints; without a curve energy rules none out."""
        if self._need is None:  # memory is known once for all questions, energy is not
            twin = self.twin
            self._need = needs_of(
                twin.workload, twin.profile, releases=twin.releases, base=twin.config
            )
        memory = self._need

        def need(knobs: Knobs) -> Need:
            captured = None if curve is None else curve.captured(knobs.topk_ratio)
            return replace(memory(knobs), captured=captured)

        return Feasibility(self.constraints, need, self.space)

    def seconds_per_forecast(self) -> float:
        """Return the CPU time of one simulation, with an S in the middle of those to choose.

        Another selection interval alone is no other simulation. So the two that are made differ in
        k, or in S where there is one k; the first one's time has loading in it.
        """
        intervals = self.space.update_intervals
        middle = intervals[len(intervals) // 2]
        settings = list(self.space.grid())
        at_middle = [knobs for knobs in settings if knobs.update_interval == middle]
        first = at_middle[len(at_middle) // 2]
        others = [
            knobs
            for knobs in settings
            if (knobs.topk_ratio, knobs.update_interval) != (first.topk_ratio, middle)
        ]
        second = min(others, key=lambda knobs: knobs.update_interval != middle, default=first)
        seconds = 0.0
        for knobs in (first, second):
            started = time.process_time()
            self.twin.forecast(knobs)
            seconds = time.process_time() - started
        return seconds

    def advise(self, question: Question) -> Advice:
        """Refit the twin, search it, and return the setting that is worth trying, if any.

        Raises:
            ConfigError: No setting keeps all constraints.
        """
        started = time.process_time()
        before = self.twin.num_simulated
        feasibility = self.feasibility(question.curve if question.has_curve else None)
        feasibility.check()
        until = started + question.most_seconds
        forecasts, found = self._looked_at(question, feasibility, until)
        advice = _weigh(forecasts, found, must_move=not feasibility.allows(question.here))
        return replace(
            advice,
            num_simulated=self.twin.num_simulated - before,
            seconds=time.process_time() - started,
        )

    def _looked_at(
        self, question: Question, feasibility: Feasibility, until: float
    ) -> tuple[Forecasts, list[ForecastedSetting]]:
        """Search, or take the last search's settings; measured ones are always among them."""
        if question.num_trials:
            forecasts = Forecasts.of(question, self.twin, self.space.select_intervals)
            found = search(forecasts, self.space, feasibility, until)
            self._seen = (forecasts, tuple(setting.knobs for setting in found))
        elif self._seen is None:
            raise ValueError("there is nothing to weigh anew: the first question needs trials")
        else:
            former, settings = self._seen
            forecasts = replace(former, question=question)
            found = [forecasts.setting(k) for k in settings if feasibility.allows(k)]
        if feasibility.allows(question.here):  # selecting less often may be all that pays
            found.append(forecasts.setting(question.here))
        known = {setting.knobs for setting in found}
        measured = dict.fromkeys(stretch.knobs for stretch in question.stretches)
        found += [
            forecasts.as_it_is(k) for k in measured if k not in known and feasibility.allows(k)
        ]
        return forecasts, found


def _weigh(forecasts: Forecasts, found: Sequence[ForecastedSetting], *, must_move: bool) -> Advice:
    """Return the advice that follows from the settings looked at."""
    question = forecasts.question
    # As they are: another ``select_interval`` would be another setting.
    here, start = forecasts.as_it_is(question.here), forecasts.as_it_is(question.start)
    if not question.stretches:
        found = _with_full_errors(forecasts, found)
    floor = start.progress / _WORST
    safe = [o for o in found if o.progress * math.exp(-_RISK * o.error) > floor]
    worth = {o: value for o in safe if (value := _value(forecasts, o)) > 0}
    stretches = [s for s in question.stretches if s.knobs == question.here]
    forecast = forecasts.forecast(question.here)
    last = stretches[-1].step_seconds if stretches else forecast.step_seconds
    best = max(worth, key=worth.__getitem__, default=None)
    if must_move and best is None:
        best = max(found, key=lambda o: o.gain, default=None)
    return Advice(
        constants=forecasts.constants,
        here=here,
        best=best,
        must_move=must_move,
        peak=max([*found, here], key=lambda o: o.gain),
        intervals=_intervals(forecasts, here, found),
        error=math.log(forecast.step_seconds / last),
    )


def _value(forecasts: Forecasts, setting: ForecastedSetting) -> float:
    """Return the expected gain of trying a setting, and of keeping it if it is better.

    The unit is a stretch's goodput; 0 or less says that the setting is not to be tried.
    """
    question = forecasts.question
    least, may_probe = _LEAST_GAIN, question.may_probe
    if replace(setting.knobs, select_interval=question.here.select_interval) == question.here:
        if not question.stretches or setting.gain <= _LEAST_SELECT_GAIN:
            return 0.0
        return setting.gain * (question.stretches_left - 1.0)
    if question.leaves_interval and _differ_in_interval(setting.knobs, question.here):
        least, may_probe = _AS_GOOD, False
    # By one error alone it would go back and forth to what has just not shown to be better.
    is_barred = any(distance(setting.knobs, lost) < _ALIKE for lost in question.barred)
    sigmas = SIGMAS_TO_BELIEVE if is_barred else 1.0
    is_adopted = setting.gain > max(sigmas * setting.error, least)
    may_probe = may_probe and not is_barred
    if not is_adopted and not (may_probe and question.stretches):
        return 0.0
    improvement = _expected_improvement(setting.gain, _posterior_sigma(forecasts, setting.error))
    if improvement < _LEAST_PROMISE:
        return 0.0
    loss = improvement - setting.gain
    left = min(question.stretches_left, 1e6) - 1.0
    return improvement * left - loss - _change(forecasts, setting, comes_back=not is_adopted)


def _posterior_sigma(forecasts: Forecasts, error: float) -> float:
    """Return the standard deviation of a gain's mean after one more stretch was measured.

    This is the knowledge gradient's sigma (Frazier et al. 2008). A measurement without noise
    would make it the error itself.
    """
    if not forecasts.question.stretches or error <= 0:
        return error
    return error**2 / math.hypot(error, forecasts.speed_noise.between_neighbours)


def _change(forecasts: Forecasts, setting: ForecastedSetting, *, comes_back: bool) -> float:
    """Return the cost of going to a setting, in stretches: a change of k stalls."""
    question = forecasts.question
    if setting.knobs.topk_ratio == question.here.topk_ratio:
        return 0.0
    forecast = forecasts.forecast(question.here)
    seconds = question.resize_seconds
    if seconds is None:  # every block's update at once, and its upload
        busy, interval = forecast.busy_seconds, question.here.update_interval
        share = update_share(question.here, forecasts.twin)
        seconds = interval * (share * busy.get("host", 0.0) + busy.get("h2d", 0.0))
    stretch = question.steps_per_stretch * forecast.step_seconds
    return (2 if comes_back else 1) * seconds / stretch


def _with_full_errors(
    forecasts: Forecasts, found: Sequence[ForecastedSetting]
) -> list[ForecastedSetting]:
    """Return the best candidates with errors that include the prior's spread.

    Measured spans fix the constants; before there are any, a gain is as uncertain as they are.
    """
    best = sorted(found, key=lambda o: -o.gain)[:_CHECKED]
    return [replace(o, error=math.hypot(o.error, forecasts.spread(o))) for o in best]


def _intervals(
    forecasts: Forecasts, here: ForecastedSetting, found: Sequence[ForecastedSetting]
) -> tuple[int, int]:
    """Return the range of S that costs next to nothing beside the best seen, about here."""
    every = here.knobs.select_interval  # S moves alone
    looked_at = {replace(o.knobs, select_interval=every) for o in found}
    same = {
        knobs.update_interval: forecasts.as_it_is(knobs).gain
        for knobs in looked_at
        if replace(knobs, update_interval=1) == replace(here.knobs, update_interval=1)
    }
    same[here.knobs.update_interval] = here.gain
    known = sorted(same)
    low = high = known.index(here.knobs.update_interval)
    while low > 0 and same[known[low - 1]] >= here.gain - _AS_GOOD:
        low -= 1
    while high + 1 < len(known) and same[known[high + 1]] >= here.gain - _AS_GOOD:
        high += 1
    return known[low], known[high]


def _differ_in_interval(one: Knobs, other: Knobs) -> bool:
    """Whether two settings differ in S alone."""
    return one != other and replace(one, update_interval=other.update_interval) == other


def _distance(one: Knobs, other: Knobs) -> float:
    """Return the distance of two settings: the sum of their knobs' ratios, in factors of two."""
    pairs = (
        (one.topk_ratio, other.topk_ratio),
        (one.update_interval, other.update_interval),
        (max(one.select_interval, 1), max(other.select_interval, 1)),
    )
    return sum(abs(math.log2(max(a, 1e-3) / max(b, 1e-3))) for a, b in pairs)


def _expected_improvement(gain: float, error: float) -> float:
    """Return E[max(0, x)] for x Gaussian about ``gain``."""
    if error <= 0:
        return max(0.0, gain)
    scaled = gain / error
    density = math.exp(-scaled * scaled / 2) / math.sqrt(2 * math.pi)
    return gain * 0.5 * (1 + math.erf(scaled / math.sqrt(2))) + error * density
