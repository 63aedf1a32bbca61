"""TwinController: tunes a run while it trains, by a simulator that follows what is measured.

After every stretch of steps with the same knobs the evidence goes to a process of its own, which
refits the simulator and searches it; what comes back is tried at once, watched for a stretch, and
kept or undone. Zen-auto may then move S within what the twin holds to be as good. No torch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from autotune.adviser.adviser import Advice, Adviser
from autotune.adviser.process import AbstractAdviserHandle, BackgroundAdviser, Ready
from autotune.constraints import Constraints
from autotune.decisions.records import Deciders
from autotune.efficiency import FITTED, DelayCost, EnergyCurve
from autotune.model.refit import Prior
from autotune.model.twin import NEUTRAL, Twin
from autotune.online.budget import FEWEST_TRIALS, SearchBudget
from autotune.online.energy_guard import EnergyGuard
from autotune.online.log_writer import Minutes, RecordSink
from autotune.online.stretches import StretchGatherer, settling_steps, stretch_steps
from autotune.online.trial_rules import Move, Tuner
from autotune.online.zen_auto import ZenAuto
from autotune.space import SearchSpace, effective_lag
from sim.hardware.profile import HardwareProfile
from sim.models.workload import Workload
from zenflow.config import ZenFlowConfig
from zenflow.controller import AbstractController, ObservedTimeline
from zenflow.errors import CheckpointError, ConfigError, WorkerError
from zenflow.knobs import Knobs
from zenflow.report import StepReport

_log = logging.getLogger(__name__)

SIGMAS: Mapping[str, float] = {"calibrated": 0.1, "table": 0.35, "generic": 1.0}
"""Log-normal spread of a profile's constants by where it comes from."""

_CURVE_INTERVAL = 20
_LOOK_EVERY, _LOOK_WINDOWS, _LOOK_STEPS = 8, 4, 32
"""Of so many spans of steps windows' norms are measured in one; a span's windows and steps, at
least. Norms take a few per cent of a small model's step, and S follows slow changes."""
_WEIGHING_SECONDS = 0.01
"""CPU time of weighing settings anew, before it is known."""
_LEAST_LEFT = 2.0
"""Stretches that must be left for a change to pay."""

MakeHandle = Callable[[Adviser], AbstractAdviserHandle]


class TwinController(AbstractController):
    """Chooses k, S, lag, rolling and select_interval by predicted goodput.

    Attributes:
        tuner: The rules and what is known.
        timeline_steps: Steps whose spans the optimizer must keep.
        budget: Of searching.
    """

    curve_interval = _CURVE_INTERVAL
    follows_clock = True

    def __init__(
        self,
        *,
        workload: Workload,
        profile: HardwareProfile,
        config: ZenFlowConfig,
        releases: bool,
        total_steps: int,
        log: RecordSink,
        sigma: float = SIGMAS["table"],
        constraints: Constraints | None = None,
        space: SearchSpace | None = None,
        zen_auto: ZenAuto | None = None,
        cost: DelayCost = FITTED,
        budget: float = 0.01,
        seed: int = 0,
        make_handle: MakeHandle = BackgroundAdviser,
    ) -> None:
        """Check the constraints and start what searches.

        Args:
            workload: Model and batch of each device.
            profile: The machine, as far as it is known.
            config: At the start; what no knob changes stays.
            releases: Whether gradients leave during backward.
            total_steps: Of the run.
            log: Takes every decision and measured stretch.
            sigma: Log-normal spread of the profile's constants; see `SIGMAS`.
            constraints: What every setting must keep.
            space: Settings to choose from.
            zen_auto: Moves S within what is as good; None leaves S to the twin alone.
            cost: How a delay counts.
            budget: CPU time of searching as a share of the run's time.
            seed: Of the searches.
            make_handle: Starts what answers questions.

        Raises:
            ConfigError: No setting keeps the constraints, or the workload can't be simulated.
        """
        self._space = space or SearchSpace()
        adviser = Adviser(
            Twin(workload, profile, config, releases=releases, windows=1),
            self._space,
            constraints or Constraints(),
            cost,
        )
        # Asked of a copy: what an adviser remembers of memory can't be sent to a process.
        replace(adviser).feasibility(None).check()
        start = Knobs.of(config)
        start = replace(start, lag=effective_lag(start))
        self.measures_windows = zen_auto is not None
        self.least_topk_ratio = min(*self._space.topk_ratios, config.topk_ratio)
        self.largest_interval = max(*self._space.update_intervals, config.update_interval)
        self.timeline_steps = 3 * self.largest_interval
        self.tuner = Tuner(
            start=start,
            prior=Prior(NEUTRAL, sigma),
            curve=EnergyCurve.default(),
            efficiency=cost.of,
        )
        self._total_steps = total_steps
        self._minutes = Minutes(log, cost, workload.tokens_per_step)
        self._zen = zen_auto
        self.budget = SearchBudget(budget, total_steps)
        self._seed = seed
        self._advice: Advice | None = None
        self._weighing_seconds = _WEIGHING_SECONDS
        self._last_reported = 0
        self._bounds: tuple[int, int] | None = None
        """Least and largest S that are as good as the one in force; None while that is unknown."""
        self._guard = EnergyGuard(constraints.smallest_captured if constraints else None)
        self._is_ready = False
        """Whether what searches has been loaded."""
        self._is_asking = False
        self._asked_after = 0
        """Drifts there had been when advice was asked for."""
        self._has_failed = False
        self._is_known_too_short = False
        self._gatherer = StretchGatherer(start)
        if zen_auto is not None:
            zen_auto.set_bounds(1, self.largest_interval)  # refuses a space that it can't follow
        self._handle = make_handle(adviser)

    def attach(self, observed: ObservedTimeline) -> None:
        """Take the optimizer's timeline."""
        self._gatherer.attach(observed)

    @property
    def search_seconds(self) -> float:
        """CPU time of searching, loading included."""
        return self.budget.spent

    @property
    def looks_at_windows(self) -> bool:  # type: ignore[override]
        """Whether Zen-auto could move S, and it is time to look."""
        now = self.tuner.here.update_interval
        span = max(_LOOK_STEPS, _LOOK_WINDOWS * now)
        return self._movable(now) != (now, now) and self._last_reported // span % _LOOK_EVERY == 0

    # ---- after every step -------------------------------------------------------------------

    def next_knobs(self, step: int, report: StepReport | None, knobs: Knobs) -> Knobs:
        """Measure; at the end of a stretch, or when advice has come, decide."""
        if report is not None and report.step > self._last_reported:
            self._last_reported = report.step
            self.budget.add_step(report.step, report.seconds - report.stall_seconds)
            self._gatherer.take(report, is_disturbed=self._is_searching)
        move = None
        if self._gatherer.is_complete(knobs):
            move = self._end_stretch(step, knobs)
        if move is None:
            move = self._hear(step)
        if move is not None:
            return self._carry_out(step, knobs, move, by="twin")
        if report is not None and self._zen is not None:
            return self._follow_training(step, report, knobs)
        return knobs

    def _end_stretch(self, step: int, knobs: Knobs) -> Move | None:
        """Hand the measured stretch to the tuner; return what follows at once."""
        stretch, curve = self._gatherer.finish(step, knobs, sees_spans=self._may_search(step))
        constants = {} if self._advice is None else self._advice.constants
        self._minutes.window(stretch, constants, self.search_seconds)
        self._guard.see(stretch)
        return self.tuner.record(stretch, curve)

    # ---- advice -----------------------------------------------------------------------------

    @property
    def _is_searching(self) -> bool:
        """Whether something loads or searches beside the training."""
        return not self._has_failed and (self._is_asking or not self._is_ready)

    def _may_search(self, step: int) -> bool:
        if self._is_asking or self._has_failed or self.budget.seconds_per_trial is None:
            return False
        if self._is_urgent:
            return True
        return self._left(step) >= _LEAST_LEFT and self._num_trials > 0

    @property
    def _num_trials(self) -> int:
        """Trials that a question may have now."""
        return self.budget.num_trials(self._num_settings)

    @property
    def _num_settings(self) -> int:
        """Settings that have been measured."""
        return len({stretch.knobs for stretch in self.tuner.stretches})

    def _may_weigh(self, step: int) -> bool:
        """Whether what the last search saw may be weighed anew: it is about the same machine."""
        if self._is_asking or self._has_failed or self._advice is None:
            return False
        is_about_now = self.tuner.drifts == self._asked_after
        return (
            is_about_now
            and self._left(step) >= _LEAST_LEFT
            and self.budget.allows(self._weighing_seconds)
        )

    @property
    def _is_urgent(self) -> bool:
        return self._guard.is_urgent and self.tuner.has_curve

    @property
    def _has_news(self) -> bool:
        """Whether there is something to ask about."""
        return self.tuner.wants_advice or self._is_urgent

    def _left(self, step: int) -> float:
        """Return for how many stretches a change could still pay."""
        here = self.tuner.here
        return (self._total_steps - step) / (stretch_steps(here) + settling_steps(here))

    def _hear(self, step: int) -> Move | None:
        """Take an answer, or ask where there is something new; return what an answer leads to."""
        try:
            answer = self._handle.poll()
            if isinstance(answer, Ready):
                self._is_ready = True
                self.budget.spent += answer.seconds
                self.budget.seconds_per_trial = answer.seconds_per_forecast
            elif answer is not None:
                return self._consider(answer)
            if self.tuner.stretches and self._has_news:
                if self._may_search(step):
                    self._ask(step, max(FEWEST_TRIALS, self._num_trials))
                elif self._may_weigh(step):
                    self._ask(step, 0)
                elif self._advice is None and not self._is_asking:
                    self._say_if_too_short()
        except ConfigError:
            if not self._guard.was_met:  # what is asked for can't be had
                raise
            self._is_asking, self._guard.has_given_up = False, True
            _log.warning("no setting keeps all constraints any more: %s stays", self.tuner.here)
        except WorkerError as error:
            if not self._has_failed:
                _log.warning("tuning stops here, training goes on: %s", error)
            self._has_failed = True
        return None

    def _say_if_too_short(self) -> None:
        if self._is_known_too_short or not self.budget.is_too_small(self._num_settings):
            return
        self._is_known_too_short = True
        _log.warning(
            "too short a run to search for better settings: that may take %.2g%% of its time, and "
            "%.2f s of CPU time are spent, starting included. %s stays; `zenflow tune` searches "
            "before a run",
            100 * self.budget.share,
            self.budget.spent,
            self.tuner.here,
        )

    def _ask(self, step: int, num_trials: int) -> None:
        question = self.tuner.question(
            select_seconds=self._gatherer.selections.seconds,
            energy_decay=self._gatherer.selections.decay,
            stretches_left=self._left(step),
            steps_per_stretch=stretch_steps(self.tuner.here),
            resize_seconds=self._gatherer.resize_seconds,
            leaves_interval=self._zen is not None,
            num_trials=num_trials,
            most_seconds=math.inf if self._is_urgent else self.budget.seconds_for_trials,
            seed=self._seed,
        )
        self._guard.asked()
        self._asked_after = self.tuner.drifts
        self._handle.ask(question)
        self._is_asking = True

    def _consider(self, advice: Advice) -> Move | None:
        self._is_asking = False
        self._advice = advice
        self.budget.spent += advice.seconds
        if advice.num_simulated:
            self.budget.seconds_per_trial = advice.seconds / advice.num_simulated
        else:
            self._weighing_seconds = advice.seconds
        if advice.here.knobs == self.tuner.here:
            self._minutes.predicted = advice.here.step_seconds
        if self.tuner.drifts != self._asked_after:
            return None  # it is about a machine that is no more
        is_about_here = advice.here.knobs == self.tuner.here
        move = self.tuner.consider(advice)
        self._bounds = advice.intervals if move is None and is_about_here else None
        return move

    # ---- changes ----------------------------------------------------------------------------

    def _movable(self, now: int) -> tuple[int, int]:
        """Return the least and the largest S that Zen-auto may choose."""
        if self._zen is None or self._bounds is None:
            return now, now
        if self._is_asking or not self.tuner.is_settled:
            return now, now
        return min(now, self._bounds[0]), max(now, self._bounds[1])

    def _follow_training(self, step: int, report: StepReport, knobs: Knobs) -> Knobs:
        """Let Zen-auto move S within what is as good, while nothing is on trial."""
        assert self._zen is not None
        now = knobs.update_interval
        self._zen.set_bounds(*self._movable(now))
        interval = self._zen.next_interval(report) if report.windows else now
        if interval == now:
            return knobs
        new = replace(knobs, update_interval=interval, lag=min(effective_lag(knobs), interval))
        self.tuner.shift(new)
        reason = "the gradient that accumulates over this S has become comparable"
        return self._carry_out(step, knobs, Move(new=new, reason=reason), by="zen-auto")

    def _carry_out(self, step: int, knobs: Knobs, move: Move, *, by: Deciders) -> Knobs:
        """Write a change down and begin to measure anew."""
        self._minutes.change(
            step, self._gatherer.num_stretches, knobs, move, self.tuner.stretches, by=by
        )
        self._gatherer.restart(knobs, move.new)
        return move.new

    # ---- state ------------------------------------------------------------------------------

    def close(self) -> None:
        """End the searching process."""
        self._handle.close()

    def state_dict(self) -> dict[str, Any]:
        """Return what is known; a stretch in progress is measured anew after a resume."""
        return {
            "tuner": self.tuner.state_dict(),
            "zen_auto": None if self._zen is None else self._zen.state_dict(),
            "num_stretches": self._gatherer.num_stretches,
            "budget": self.budget.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what ``state_dict`` returned.

        Raises:
            CheckpointError: The state isn't this controller's.
        """
        try:
            if (state["zen_auto"] is None) != (self._zen is None):
                raise ValueError("one of the two has Zen-auto and the other has not")
            self.tuner.load_state_dict(state["tuner"])
            if self._zen is not None:
                self._zen.load_state_dict(state["zen_auto"])
            self._gatherer.num_stretches = int(state["num_stretches"])
            self.budget.load_state_dict(state["budget"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"this is not the state of a TwinController like this one ({error!r}): resume "
                "with the controller that was saved"
            ) from error
        self._gatherer.restart(self.tuner.here, self.tuner.here)
