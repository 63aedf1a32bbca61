"""TwinController: tunes a run while it trains, by a simulator that follows the measurements.

After every stretch of steps with one setting the evidence goes to a process of its own, which
refits the simulator and searches it. Its proposal is tried at once, watched for a stretch, and
kept or undone. Zen-auto may then move S among values that the twin holds to be equally good.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import Enum, auto
from typing import Any

from autotune.adviser.adviser import Adviser
from autotune.adviser.messages import Advice
from autotune.adviser.process import AbstractAdviserHandle, BackgroundAdviser, Ready
from autotune.decisions.file import DecisionLog
from autotune.decisions.records import Deciders
from autotune.online.budget import FEWEST_TRIALS, SearchBudget
from autotune.online.energy_guard import EnergyGuard
from autotune.online.log_writer import DecisionWriter
from autotune.online.stretches import StretchGatherer, settling_steps, stretch_steps
from autotune.online.trial_rules import KnobChange, TrialRules
from autotune.online.zen_auto import ZenAuto
from zenflow.config import ZenFlowConfig
from zenflow.controller import AbstractController, ObservedTimeline
from zenflow.errors import CheckpointError, ConfigError, WorkerError
from zenflow.knobs import Knobs
from zenflow.report import StepReport

_log = logging.getLogger(__name__)

SIGMAS: Mapping[str, float] = {"calibrated": 0.1, "table": 0.35, "generic": 1.0}
"""Log-normal spread of a profile's constants, by the profile's source."""

_LOOK_EVERY, _LOOK_WINDOWS, _LOOK_STEPS = 8, 4, 32
"""Number of spans of steps of which one has windows' norms measured; least windows and steps of a
span. Norms take a few per cent of a small model's step, and S follows slow changes."""
_WEIGHING_SECONDS = 0.01
"""CPU seconds of weighing settings anew, before they are known."""
_LEAST_LEFT = 2.0
"""Number of stretches that must be left for a change to pay."""


class Searching(Enum):
    """State of the process that searches."""

    LOADING = auto()
    """The process loads its modules."""
    READY = auto()
    """The process can be asked."""
    TOO_SHORT = auto()
    """The process can be asked, but the run is too short to pay for it, and that has been said."""
    ASKED = auto()
    """The process works at a question."""
    FAILED = auto()
    """The process has ended: tuning stops, training goes on."""

    @property
    def can_be_asked(self) -> bool:
        """Whether a question may be handed over."""
        return self in (Searching.READY, Searching.TOO_SHORT)

    @property
    def is_at_work(self) -> bool:
        """Whether the process shares the machine with the training."""
        return self in (Searching.LOADING, Searching.ASKED)


class TwinController(AbstractController):
    """Tunes k, S and select_interval while a run trains, for the largest predicted goodput.

    Nobody knows before a run which setting suits the machine. The controller measures the run,
    corrects a simulator by it, tries the setting that promises most, and keeps it only if it
    proves better. Give the controller to the optimizer: ``ZenFlowAdamW(...,
    controller=controller)``.

    Attributes:
        rules: Rules of trying, keeping and going back, and what is known.
        timeline_steps: Steps whose spans the optimizer must keep.
        budget: Of searching.

    Examples:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from autotune.model.twin import Twin
        >>> from sim.hardware.catalog import find_machine
        >>> from sim.models.table import find_model
        >>> from sim.models.workload import Workload
        >>> config = ZenFlowConfig(topk_ratio=0.1, update_interval=4)
        >>> workload = Workload.of_config(*find_model("gpt2"), batch_size=8)
        >>> adviser = Adviser(Twin(workload, find_machine("hgx-h100", 1), config))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     log = DecisionLog(Path(folder) / "decisions.jsonl")
        ...     controller = TwinController(adviser, config=config, total_steps=1000, log=log)
        ...     controller.close()
        >>> controller.rules.here.update_interval  # until something better has been measured
        4
    """

    curve_interval = 20
    follows_clock = True

    def __init__(
        self,
        adviser: Adviser,
        *,
        config: ZenFlowConfig,
        total_steps: int,
        log: DecisionLog,
        sigma: float = SIGMAS["table"],
        zen_auto: ZenAuto | None = None,
        budget: float = 0.01,
        seed: int = 0,
        make_handle: Callable[[Adviser], AbstractAdviserHandle] = BackgroundAdviser,
    ) -> None:
        """Check the constraints and start what searches.

        Args:
            adviser: Answers questions on the run's workload and machine.
            config: At the start; what no knob changes stays.
            total_steps: Of the run.
            log: Takes every decision and measured stretch.
            sigma: Log-normal spread of the twin's constants; see `SIGMAS`.
            zen_auto: Moves S within what is as good; None leaves S to the twin alone.
            budget: CPU time of searching as a share of the run's time.
            seed: Of the searches.
            make_handle: Starts what answers questions.

        Raises:
            ConfigError: No setting keeps the constraints, or Zen-auto can't follow the space.
        """
        adviser.feasibility(None).check()
        space, start = adviser.space, Knobs.of(config)
        self.measures_windows = zen_auto is not None
        self.least_topk_ratio = min(*space.topk_ratios, config.topk_ratio)
        self.largest_interval = max(*space.update_intervals, config.update_interval)
        self.timeline_steps = 3 * self.largest_interval
        self.rules = TrialRules(start, sigma)
        self.budget = SearchBudget(budget, total_steps)
        self._total_steps = total_steps
        self._writer = DecisionWriter(log, adviser.twin.workload.tokens_per_step)
        self._zen = zen_auto
        self._seed = seed
        self._advice: Advice | None = None
        self._weighing_seconds = _WEIGHING_SECONDS
        self._last_reported = 0
        self._bounds: tuple[int, int] | None = None
        """Least and largest S that are as good as the one in force; None while that is unknown."""
        self._guard = EnergyGuard(adviser.constraints.smallest_captured)
        self._searching = Searching.LOADING
        self._asked_after = 0
        """Number of drifts there had been when advice was asked for."""
        self._gatherer = StretchGatherer(start, rolling=config.rolling)
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
        """Whether Zen-auto could change S, and it is time to look."""
        now = self.rules.here.update_interval
        span = max(_LOOK_STEPS, _LOOK_WINDOWS * now)
        return self._movable(now) != (now, now) and self._last_reported // span % _LOOK_EVERY == 0

    # ---- after every step -------------------------------------------------------------------

    def next_knobs(self, step: int, report: StepReport | None, knobs: Knobs) -> Knobs:
        """Measure; at the end of a stretch, or when advice has come, decide."""
        if report is not None and report.step > self._last_reported:
            self._last_reported = report.step
            self.budget.add_step(report.step, report.seconds - report.stall_seconds)
            self._gatherer.take(report, is_disturbed=self._searching.is_at_work)
        change = None
        if self._gatherer.is_complete(knobs, self.rules.hopeless_seconds):
            change = self._end_stretch(step, knobs)
        if change is None:
            change = self._hear(step)
        if change is not None:
            return self._carry_out(step, knobs, change, by="twin")
        if report is not None and self._zen is not None:
            return self._follow_training(step, report, knobs)
        return knobs

    def _end_stretch(self, step: int, knobs: Knobs) -> KnobChange | None:
        """Hand the measured stretch to the tuner; return what follows at once."""
        sees_spans = self._may_search(step, is_new=True)  # whatever it shows: it may be a drift
        stretch, curve = self._gatherer.finish(step, knobs, sees_spans=sees_spans)
        constants = {} if self._advice is None else self._advice.constants
        self._writer.window(stretch, constants, self.search_seconds)
        self._guard.see(stretch)
        home, drifts = self.rules.home, self.rules.drifts
        change = self.rules.record(stretch, curve)
        if home is None or self.rules.home is not None or self.rules.drifts == drifts:
            return change
        # The machine changed in a trial: without a search nobody would ever judge the setting.
        return None if self._may_search(step) else self.rules.go_to(home)

    # ---- advice -----------------------------------------------------------------------------

    def _may_search(self, step: int, *, is_new: bool = False) -> bool:
        if not self._searching.can_be_asked:
            return False
        if self._is_urgent:
            return True
        return self._left(step) >= _LEAST_LEFT and self._num_trials(is_new=is_new) > 0

    def _num_trials(self, *, is_new: bool = False) -> int:
        is_new = is_new or self._advice is None or self.rules.drifts != self._asked_after
        return self.budget.num_trials(self._num_settings, is_new=is_new)

    @property
    def _num_settings(self) -> int:
        """Number of settings that have been measured."""
        return len({stretch.knobs for stretch in self.rules.stretches})

    def _may_weigh(self, step: int) -> bool:
        """Whether the last search's settings may be weighed anew: no drift since."""
        is_about_now = self._advice is not None and self.rules.drifts == self._asked_after
        return (
            self._searching.can_be_asked
            and is_about_now
            and self._left(step) >= _LEAST_LEFT
            and self.budget.seconds_left >= self._weighing_seconds
        )

    @property
    def _is_urgent(self) -> bool:
        return self._guard.is_urgent and self.rules.has_curve

    def _left(self, step: int) -> float:
        """Return for how many stretches a change could still pay."""
        here = self.rules.here
        return (self._total_steps - step) / (stretch_steps(here) + settling_steps(here))

    def _hear(self, step: int) -> KnobChange | None:
        """Take an answer, or ask where there is something new; return what an answer leads to."""
        if self._searching is Searching.FAILED:
            return None
        try:
            answer = self._handle.poll()
            if isinstance(answer, Ready):
                self._searching = Searching.READY
                self.budget.spent += answer.seconds
                self.budget.seconds_per_trial = answer.seconds_per_forecast
            elif answer is not None:
                return self._consider(answer)
            if self.rules.stretches and (self.rules.wants_advice or self._is_urgent):
                if self._may_search(step):
                    self._ask(step, max(FEWEST_TRIALS, self._num_trials()))
                elif self._may_weigh(step):
                    self._ask(step, 0)
                elif self._advice is None and self._searching is Searching.READY:
                    self._say_if_too_short()
        except ConfigError:
            if not self._guard.was_met:  # what is asked for can't be had
                raise
            self._searching, self._guard.has_given_up = Searching.READY, True
            _log.warning("no setting keeps all constraints any more: %s stays", self.rules.here)
        except WorkerError as error:
            _log.warning("tuning stops here, training goes on: %s", error)
            self._searching = Searching.FAILED
        return None

    def _say_if_too_short(self) -> None:
        if not self.budget.is_too_small(self._num_settings):
            return
        self._searching = Searching.TOO_SHORT
        _log.warning(
            "too short a run to search for better settings: that may take %.2g%% of its time, and "
            "%.2f s of CPU time are spent, starting included. %s stays; `zenflow tune` searches "
            "before a run",
            100 * self.budget.share,
            self.budget.spent,
            self.rules.here,
        )

    def _ask(self, step: int, num_trials: int) -> None:
        question = self.rules.question(
            select_seconds=self._gatherer.selections.seconds,
            energy_decay=self._gatherer.selections.decay,
            stretches_left=self._left(step),
            steps_per_stretch=stretch_steps(self.rules.here),
            resize_seconds=self._gatherer.resize_seconds,
            leaves_interval=self._zen is not None,
            num_trials=num_trials,
            most_seconds=(
                math.inf if self._is_urgent else self.budget.seconds_for_trials(num_trials)
            ),
            seed=self._seed,
        )
        self._guard.asked()
        self._asked_after = self.rules.drifts
        self._handle.ask(question)
        self._searching = Searching.ASKED

    def _consider(self, advice: Advice) -> KnobChange | None:
        self._searching = Searching.READY
        self._advice = advice
        self.budget.spent += advice.seconds
        if advice.num_simulated:
            self.budget.seconds_per_trial = advice.seconds / advice.num_simulated
        else:
            self._weighing_seconds = advice.seconds
        is_about_here = advice.here.knobs == self.rules.here
        if is_about_here:
            self._writer.predicted = advice.here.step_seconds
        if self.rules.drifts != self._asked_after:
            return None  # it is about a machine that is no more
        seconds = self._gatherer.seconds_beside_search
        if is_about_here and seconds is not None and self.rules.is_strange(seconds):
            return None  # it may be: the setting in force is measured again first
        change = self.rules.consider(advice)
        self._bounds = advice.intervals if change is None and is_about_here else None
        return change

    # ---- changes ----------------------------------------------------------------------------

    def _movable(self, now: int) -> tuple[int, int]:
        """Return the least and the largest S that Zen-auto may choose."""
        if self._zen is None or self._bounds is None:
            return now, now
        if self._searching is Searching.ASKED or not self.rules.is_settled:
            return now, now
        return min(now, self._bounds[0]), max(now, self._bounds[1])

    def _follow_training(self, step: int, report: StepReport, knobs: Knobs) -> Knobs:
        """Let Zen-auto change S among equally good values, while nothing is on trial."""
        assert self._zen is not None
        now = knobs.update_interval
        self._zen.set_bounds(*self._movable(now))
        interval = self._zen.next_interval(report) if report.windows else now
        if interval == now:
            return knobs
        new = replace(knobs, update_interval=interval)
        self.rules.here = new
        reason = "the gradient that accumulates over this S has become comparable"
        return self._carry_out(step, knobs, KnobChange(new=new, reason=reason), by="zen-auto")

    def _carry_out(self, step: int, knobs: Knobs, change: KnobChange, *, by: Deciders) -> Knobs:
        """Write a change down and begin to measure anew."""
        self._writer.change(
            step, self._gatherer.num_stretches, knobs, change, self.rules.stretches, by=by
        )
        self._gatherer.restart(knobs, change.new)
        return change.new

    # ---- state ------------------------------------------------------------------------------

    def close(self) -> None:
        """End the searching process."""
        self._handle.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the evidence so far; a stretch in progress is measured anew after a resume."""
        return {
            "tuner": self.rules.state_dict(),
            "zen_auto": None if self._zen is None else self._zen.state_dict(),
            "num_stretches": self._gatherer.num_stretches,
            "budget": self.budget.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that ``state_dict`` returned.

        Raises:
            CheckpointError: The state isn't this controller's.
        """
        try:
            if (state["zen_auto"] is None) != (self._zen is None):
                raise ValueError("one of the two has Zen-auto and the other has not")
            self.rules.load_state_dict(state["tuner"])
            if self._zen is not None:
                self._zen.load_state_dict(state["zen_auto"])
            self._gatherer.num_stretches = int(state["num_stretches"])
            self.budget.load_state_dict(state["budget"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"this is not the state of a TwinController like this one ({error!r}): resume "
                "with the controller that was saved"
            ) from error
        self._gatherer.restart(self.rules.here, self.rules.here)
