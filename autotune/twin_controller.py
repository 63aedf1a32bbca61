"""TwinController: tunes a run while it trains, by a simulator that follows what is measured.

After every stretch of steps with the same knobs the evidence goes to a process of its own, which
refits the simulator and searches it; what comes back is tried at once, watched for a stretch, and
kept or undone. Zen-auto may then move S within what the twin holds to be as good. No torch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, Protocol

from autotune.advice import Advice, Adviser
from autotune.background import AbstractAdviserHandle, BackgroundAdviser, Ready
from autotune.constraints import Constraints
from autotune.decision_records import Deciders, Decision, WindowRecord
from autotune.efficiency import FITTED, DelayCost, EnergyCurve
from autotune.measured import Stretch, robust_mean
from autotune.refit import Prior
from autotune.selections import SelectionWatch
from autotune.space import SearchSpace, effective_lag
from autotune.tuner import Move, Tuner
from autotune.twin import NEUTRAL, Twin
from autotune.zen_auto import ZenAuto
from sim.hardware import HardwareProfile
from sim.workload import Workload
from zenflow.config import ZenFlowConfig
from zenflow.controller import AbstractController, ObservedTimeline
from zenflow.errors import CheckpointError, WorkerError
from zenflow.knobs import Knobs
from zenflow.report import StepReport
from zenflow.timeline import Timeline

_log = logging.getLogger(__name__)

SIGMAS: Mapping[str, float] = {"calibrated": 0.1, "table": 0.35, "generic": 1.0}
"""Log-normal spread of a profile's constants by where it comes from."""

_LEAST_STEPS = 12
"""Of a stretch."""
_LEAST_WINDOWS = 3
_CURVE_INTERVAL = 50
_FEWEST_TRIALS, _MOST_TRIALS = 8, 60
_BESIDE_TRIALS = 12
"""Simulations of a question that are no trials: those that refit and compare."""
_SHARE_OF_BUDGET = 0.5
"""Of what is left, for one question: there will be others."""
_LEAST_LEFT = 2.0
"""Stretches that must be left for a change to pay."""

MakeHandle = Callable[[Adviser], AbstractAdviserHandle]


class RecordSink(Protocol):
    """Where decisions are written."""

    def append(self, record: WindowRecord | Decision) -> None:
        """Write a record."""


class TwinController(AbstractController):
    """Chooses k, S, lag, rolling and select_interval by predicted goodput.

    Attributes:
        tuner: The rules and what is known.
        timeline_steps: Steps whose spans the optimizer must keep.
        search_seconds: CPU time of searching, loading included.
    """

    curve_interval = _CURVE_INTERVAL

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
        self.search_seconds = 0.0
        self.tuner = Tuner(
            start=start,
            prior=Prior(NEUTRAL, sigma),
            curve=EnergyCurve.default(),
            efficiency=cost.of,
        )
        self._cost = cost
        self._tokens = workload.tokens_per_step
        self._total_steps = total_steps
        self._log = log
        self._zen = zen_auto
        self._budget = budget
        self._seed = seed
        self._observed: ObservedTimeline | None = None
        self._selections = SelectionWatch()
        self._advice: Advice | None = None
        self._predicted: float | None = None
        self._run_seconds = 0.0
        self._num_stretches = 0
        self._last_reported = 0
        self._seconds_per_trial: float | None = None
        self._is_asking = False
        self._has_failed = False
        self._reports: list[StepReport] = []
        self._to_skip = self._settling(start)
        if zen_auto is not None:
            zen_auto.set_bounds(1, self.largest_interval)  # refuses a space that it can't follow
            self._hold_zen(start)
        self._handle = make_handle(adviser)

    def attach(self, observed: ObservedTimeline) -> None:
        """Take the optimizer's timeline."""
        self._observed = observed

    # ---- after every step -------------------------------------------------------------------

    def next_knobs(self, step: int, report: StepReport | None, knobs: Knobs) -> Knobs:
        """Measure; at the end of a stretch, or when advice has come, decide."""
        if report is not None and report.step > self._last_reported:
            self._last_reported = report.step
            self._take(report)
        move = None
        if len(self._reports) >= self._length(knobs):
            move = self._end_stretch(step, knobs)
        if move is None:
            move = self._hear(step)
        if move is not None:
            return self._carry_out(step, knobs, move, by="twin")
        if report is not None and self._zen is not None:
            return self._follow_training(step, report, knobs)
        return knobs

    def _take(self, report: StepReport) -> None:
        self._run_seconds += report.seconds
        self._selections.take(report)
        if self._to_skip > 0:
            self._to_skip -= 1
        else:
            self._reports.append(report)

    def _end_stretch(self, step: int, knobs: Knobs) -> Move | None:
        """Hand the measured stretch to the tuner; return what follows at once."""
        reports, self._reports = self._reports, []
        seconds = [r.seconds - r.stalls.get("select", 0.0) for r in reports]
        mean, noise = robust_mean(seconds, knobs.update_interval)
        curves = [r.energy_curve for r in reports if r.energy_curve]
        stretch = Stretch(
            index=self._num_stretches,
            last_step=step,
            knobs=replace(knobs, lag=effective_lag(knobs)),
            step_seconds=mean,
            noise=noise,
            stall_seconds=fmean(r.stall_seconds - r.stalls.get("select", 0.0) for r in reports),
            rho=1.0 - min(1.0, max(0.0, fmean(r.captured_energy for r in reports))),
            busy_seconds=self._busy(reports) if self._may_ask(step) else {},
        )
        self._num_stretches += 1
        self._write_window(stretch)
        curve = EnergyCurve.of(curves[-1]) if curves else None
        return self.tuner.record(stretch, curve)

    def _busy(self, reports: Sequence[StepReport]) -> Mapping[str, float]:
        """Return each lane's busy seconds per step, over whole windows of these steps.

        As far as their spans are kept; the last steps' work is not over.
        """
        timeline = Timeline() if self._observed is None else self._observed.timeline
        newest, interval = reports[-1], reports[-1].update_interval
        first = min((span.step for span in timeline.spans), default=newest.step) + 1
        first = max(first, reports[0].step)  # the first that is kept may be cut
        last = newest.step - max(1, newest.lag)
        count = (last - first + 1) // interval * interval
        if count < 1:
            return {}
        inner = timeline.steps(last - count + 1, last)
        return {lane: inner.busy(lane) / count for lane in inner.lanes}

    # ---- advice -----------------------------------------------------------------------------

    def _may_ask(self, step: int) -> bool:
        return not (self._is_asking or self._has_failed) and self._num_trials(step) > 0

    def _num_trials(self, step: int) -> int:
        """Return how many trials the budget allows now; 0 if too few to be worth asking."""
        if self._seconds_per_trial is None or self._left(step) < _LEAST_LEFT:
            return 0
        done = max(1, self._last_reported)
        expected = self._run_seconds * self._total_steps / done
        room = _SHARE_OF_BUDGET * (self._budget * expected - self.search_seconds)
        trials = int(room / max(self._seconds_per_trial, 1e-6)) - _BESIDE_TRIALS
        return 0 if trials < _FEWEST_TRIALS else min(_MOST_TRIALS, trials)

    def _left(self, step: int) -> float:
        """Return for how many stretches a change could still pay."""
        here = self.tuner.here
        return (self._total_steps - step) / (self._length(here) + self._settling(here))

    def _hear(self, step: int) -> Move | None:
        """Take an answer, or ask where there is something new; return what an answer leads to."""
        try:
            answer = self._handle.poll()
            if isinstance(answer, Ready):
                self.search_seconds += answer.seconds
                self._seconds_per_trial = answer.seconds_per_forecast
            elif answer is not None:
                return self._consider(answer)
            if self.tuner.stretches and self.tuner.wants_advice and self._may_ask(step):
                self._ask(step)
        except WorkerError as error:
            if not self._has_failed:
                _log.warning("tuning stops here, training goes on: %s", error)
            self._has_failed = True
        return None

    def _ask(self, step: int) -> None:
        question = self.tuner.question(
            select_seconds=self._selections.seconds,
            energy_decay=self._selections.decay,
            stretches_left=self._left(step),
            num_trials=self._num_trials(step),
            seed=self._seed,
        )
        self._handle.ask(question)
        self._is_asking = True

    def _consider(self, advice: Advice) -> Move | None:
        self._is_asking = False
        self._advice = advice
        self.search_seconds += advice.seconds
        if advice.num_simulated:
            self._seconds_per_trial = advice.seconds / advice.num_simulated
        if advice.here.knobs == self.tuner.here:
            self._predicted = advice.here.step_seconds
            if self._zen is not None:
                self._zen.set_bounds(*advice.intervals)
        return self.tuner.consider(advice)

    # ---- changes ----------------------------------------------------------------------------

    def _follow_training(self, step: int, report: StepReport, knobs: Knobs) -> Knobs:
        """Let Zen-auto move S while nothing is on trial."""
        assert self._zen is not None
        interval = self._zen.next_interval(report)
        if not self.tuner.is_settled or self._is_asking:
            return knobs
        if interval in (knobs.update_interval, report.update_interval):
            return knobs
        lag = min(effective_lag(knobs), interval)
        new = replace(knobs, update_interval=interval, lag=lag)
        self.tuner.shift(new)
        reason = "the accumulated gradient's norm is comparable at this S"
        return self._carry_out(step, knobs, Move(new=new, reason=reason), by="zen-auto")

    def _carry_out(self, step: int, knobs: Knobs, move: Move, *, by: Deciders) -> Knobs:
        """Write a change down and begin to measure anew."""
        last = self.tuner.stretches[-1] if self.tuner.stretches else None
        measured = [s.step_seconds for s in self.tuner.stretches if s.knobs == knobs]
        self._log.append(
            Decision(
                step=step,
                window=self._num_stretches,
                by=by,
                old=knobs,
                new=move.new,
                predicted_step_seconds=move.predicted_step_seconds,
                measured_step_seconds=measured[-1] if measured else None,
                gain=move.gain,
                error=move.error,
                rho=None if last is None else last.rho,
                reason=move.reason,
            )
        )
        self._predicted = move.predicted_step_seconds
        self._reports = []
        self._to_skip = self._settling(move.new) + knobs.update_interval
        self._selections.interrupt()
        if by == "twin":
            self._hold_zen(move.new)
        return move.new

    def _hold_zen(self, knobs: Knobs) -> None:
        """Let Zen-auto go on from this S, and leave it until the twin says what is as good."""
        if self._zen is not None:
            self._zen.set_bounds(knobs.update_interval, knobs.update_interval)

    def _write_window(self, stretch: Stretch) -> None:
        worth = self._cost.of(stretch.knobs, stretch.rho)
        self._log.append(
            WindowRecord(
                step=stretch.last_step,
                window=stretch.index,
                knobs=stretch.knobs,
                step_seconds=stretch.step_seconds,
                stall_seconds=max(0.0, stretch.stall_seconds),
                predicted_step_seconds=self._predicted,
                goodput=self._tokens / stretch.step_seconds * worth,
                rho=stretch.rho,
                constants={} if self._advice is None else dict(self._advice.constants),
                search_seconds=self.search_seconds,
            )
        )

    @staticmethod
    def _length(knobs: Knobs) -> int:
        """Return the steps of a stretch: whole windows, several of them."""
        interval = knobs.update_interval
        windows = max(_LEAST_WINDOWS, math.ceil(_LEAST_STEPS / interval))
        return windows * interval

    @staticmethod
    def _settling(knobs: Knobs) -> int:
        """Return the steps after a change in which queues fill."""
        return knobs.update_interval + effective_lag(knobs) + 1

    # ---- state ------------------------------------------------------------------------------

    def close(self) -> None:
        """End the searching process."""
        self._handle.close()

    def state_dict(self) -> dict[str, Any]:
        """Return what is known; a stretch in progress is measured anew after a resume."""
        return {
            "tuner": self.tuner.state_dict(),
            "zen_auto": None if self._zen is None else self._zen.state_dict(),
            "num_stretches": self._num_stretches,
            "run_seconds": self._run_seconds,
            "search_seconds": self.search_seconds,
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
            self._num_stretches = int(state["num_stretches"])
            self._run_seconds = float(state["run_seconds"])
            self.search_seconds = float(state["search_seconds"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"this is not the state of a TwinController like this one ({error!r}): resume "
                "with the controller that was saved"
            ) from error
        self._reports = []
        self._to_skip = self._settling(self.tuner.here)
