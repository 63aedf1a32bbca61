"""Trial loop: one worker's part of a study, as long as there is something left to measure.

Workers know of each other only by the study's storage. A trial's user attributes name its worker
(``worker``), its setting (``knobs``), its end (``outcome``) and its metrics (``measurement``).
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

import optuna
from optuna.trial import FrozenTrial, Trial, TrialState

from autotune.constraints import Constraints, Feasibility
from autotune.interrupts import Interrupts
from autotune.offline.backends import AbstractBackend
from autotune.offline.objective import Objective, objectives_of
from autotune.offline.samplers import ORDERED, make_sampler, tell_misses
from autotune.offline.storage import fail_lost_trials, open_storage, signature
from autotune.space import SearchSpace
from zenflow.errors import ConfigError
from zenflow.knobs import Knobs

TrialOutcome = Literal["measured", "infeasible", "repeated", "surplus", "error", "interrupted"]

_PURPOSE = "zenflow"
"""Attribute of the study that says what it tunes."""
_REFUSALS = 4
"""Number of trials in a row that choose what is not allowed or known already.

Then a new setting is given, a neighbour of what was chosen if there is one."""
_ERRORS = 3
"""Number of settings that can't be carried out, with none that can, after which a study ends."""
_POLL_SECONDS = 0.2
_JITTER_SECONDS = 0.02
_STRIDE = 7919
"""Distance between seeds of calls, and between starts of workers in the grid: a prime."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningTask:
    """Everything that a study needs: backend, space, objectives, limits.

    See `autotune.offline.study.tune`.
    """

    backend: AbstractBackend
    space: SearchSpace = field(default_factory=SearchSpace)
    objectives: tuple[str, ...] = ("goodput",)
    constraints: Constraints = field(default_factory=Constraints)
    sampler: str = "tpe"
    seed: int = 0
    num_trials: int = 100
    """Number of finished trials over all workers, those before a resume included."""
    study_name: str = "zenflow"
    storage: str | None = None

    @property
    def goals(self) -> tuple[Objective, ...]:
        """Objectives of these names."""
        return objectives_of(self.objectives)

    @property
    def default(self) -> Knobs:
        """The setting in force before anything is tuned."""
        return self.backend.default


def open_study(task: TuningTask) -> optuna.Study:
    """Return the task's study, made if its storage has none of this name.

    Raises:
        ConfigError: The storage can't be opened, or the study is about something else.
    """
    study = optuna.create_study(
        study_name=task.study_name,
        storage=open_storage(task.storage),
        directions=[goal.direction for goal in task.goals],
        load_if_exists=True,
    )
    purpose = {
        **task.backend.describe(),
        "objectives": list(task.objectives),
        "constraints": asdict(task.constraints),
        "space": {name: list(values) for name, values in task.space.values.items()},
        "default": task.default.to_dict(),
    }
    there = study.user_attrs.get(_PURPOSE)
    if there is None and not study.get_trials(deepcopy=False):
        study.set_user_attr(_PURPOSE, purpose)
    elif there != purpose:
        differing = [key for key in purpose if (there or {}).get(key) != purpose[key]]
        raise ConfigError(
            f"study {task.study_name!r} in {task.storage} differs in {', '.join(differing)}: "
            "continue it with the settings that it was begun with, or take another study name"
        )
    return study


class TrialLoop:
    """Takes trials until enough are finished, time is up, or nothing new is left."""

    def __init__(
        self,
        study: optuna.Study,
        task: TuningTask,
        interrupts: Interrupts,
        *,
        index: int = 0,
        num_before: int = 0,
    ) -> None:
        """Make the sampler; ``num_before`` trials were there before this call of `tune`."""
        self._study = study
        self._task = task
        self._interrupts = interrupts
        self._index = index
        self._feasibility = Feasibility(task.constraints, task.backend.need, task.space)
        self._worker = signature()
        self._refusals = 0
        self._wish: Knobs | None = None
        """Settings that the sampler chose last and that were refused."""
        self._order: list[Knobs] = []
        self._goals = task.goals
        # A resumed study goes on with other choices, or it would only repeat what is known. QMC
        # counts its points in the storage, and all workers have to count along one sequence.
        own = 0 if task.sampler == "qmc" else index + _STRIDE * num_before
        self._sampler = make_sampler(
            task.sampler,
            (task.seed + own) % 2**32,
            is_constrained=bool(task.constraints.names),
        )

    def run(self, timeout: float | None, on_trial: Callable[[], None]) -> None:
        """Take trials.

        Args:
            timeout: Seconds after which no other one is begun; None is no limit.
            on_trial: Called after each.

        Raises:
            ConfigError: No setting can be carried out.
            KeyboardInterrupt: A signal has come; the trial that was running has been failed.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while deadline is None or time.monotonic() < deadline:
            self._interrupts.check()
            trials = self._trials()
            fail_lost_trials(self._study, trials)
            running = sum(trial.state is TrialState.RUNNING for trial in trials)
            waiting = any(trial.state is TrialState.WAITING for trial in trials)
            missing = self._task.num_trials - _num_finished(trials)
            if missing <= 0:
                return
            given = self._given(trials) if missing > running else None
            has_choice = waiting or given is not None or not self._must_be_given
            if missing <= running or not has_choice:
                if not running:
                    return  # every setting has been measured
                time.sleep(_POLL_SECONDS)  # another worker's trial may yet get lost
                continue
            self._study.sampler = self._choosing(given)
            self._study.optimize(self._evaluate, n_trials=1, catch=(ConfigError,))
            self._check_errors()
            on_trial()

    @property
    def _must_be_given(self) -> bool:
        return self._task.sampler == "grid" or self._refusals >= _REFUSALS

    def _given(self, trials: Sequence[FrozenTrial]) -> Knobs | None:
        """Return the setting that is to be tried next whatever the sampler says, if any."""
        known = self._known(trials)
        default = self._task.default
        if default in self._task.space and default not in known:
            return default
        if not self._must_be_given:
            return None
        if not self._order:
            self._order = self._shuffled()
        near: list[Knobs] = []
        if self._wish is not None and self._task.sampler != "grid":
            around = self._task.space.neighbours(self._wish)
            near = [knobs for knobs in around if self._feasibility.allows(knobs)]
        return next((knobs for knobs in (*near, *self._order) if knobs not in known), None)

    def _choosing(self, given: Knobs | None) -> optuna.samplers.BaseSampler:
        """Return the sampler of the next setting: the study's, or one that yields ``given``.

        The given setting isn't put into the study's queue: SQLite locks no rows, and two workers
        have taken the same trial from it, one of which then dies of the other's result.
        """
        if given is None:
            return self._sampler
        space, ordered = self._task.space, self._task.sampler in ORDERED
        params = space.indices_of(given) if ordered else space.params_of(given)
        return optuna.samplers.PartialFixedSampler(params, self._sampler)

    def _shuffled(self) -> list[Knobs]:
        """Return the allowed settings in an order by the seed; each worker starts elsewhere."""
        order = [knobs for knobs in self._task.space.grid() if self._feasibility.allows(knobs)]
        random.Random(self._task.seed).shuffle(order)
        start = self._index * _STRIDE % max(1, len(order))
        return order[start:] + order[:start]

    def _known(self, trials: Sequence[FrozenTrial]) -> set[Knobs]:
        """Return the settings that need no other trial; those of lost trials do."""
        return {
            Knobs.from_dict(trial.user_attrs["knobs"])
            for trial in trials
            if "knobs" in trial.user_attrs
            and (
                trial.state in (TrialState.COMPLETE, TrialState.RUNNING, TrialState.WAITING)
                or trial.user_attrs.get("outcome") in ("infeasible", "error")
            )
        }

    def _trials(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)

    def _evaluate(self, trial: Trial) -> list[float]:
        """Return the objectives' values of the setting that a trial chooses."""
        trial.set_user_attr("worker", self._worker)
        try:
            return self._measured(trial)
        except ConfigError as error:
            trial.set_user_attr("outcome", "error")
            trial.set_user_attr("message", str(error))
            raise
        except KeyboardInterrupt:
            trial.set_user_attr("outcome", "interrupted")
            raise

    def _measured(self, trial: Trial) -> list[float]:
        task = self._task
        suggest = task.space.suggest_indices if task.sampler in ORDERED else task.space.suggest
        knobs = suggest(trial)
        # First said, then looked whether another worker has said the same: so two may give way
        # to each other, but never both go on.
        trial.set_user_attr("knobs", knobs.to_dict())
        self._wish = knobs
        misses = self._feasibility.misses(knobs)
        if any(missed > 0 for missed in misses.values()):
            tell_misses(trial, misses)
            self._refuse(trial, "infeasible")
        others = [item for item in self._trials() if item.number != trial.number]
        if knobs in self._known(others):
            self._refuse(trial, "repeated")
        ahead = [t for t in others if t.state is TrialState.RUNNING and t.number < trial.number]
        if _num_finished(others) + len(ahead) >= task.num_trials:
            self._refuse(trial, "surplus")
        with self._interrupts.allowed():
            done = task.backend.measure(knobs)
        values = [goal.value(done, knobs) for goal in self._goals]
        if not all(map(math.isfinite, values)):
            raise ConfigError(f"{knobs} gave no figures: {done}")
        trial.set_user_attr("measurement", done.to_dict())
        tell_misses(trial, task.constraints.misses(done.need))
        trial.set_user_attr("outcome", "measured")
        self._refusals, self._wish = 0, None
        return values

    def _refuse(self, trial: Trial, outcome: TrialOutcome) -> None:
        """End a trial without a measurement."""
        self._refusals += 1
        trial.set_user_attr("outcome", outcome)
        if outcome == "repeated":
            time.sleep(random.uniform(0, _JITTER_SECONDS))  # or two workers give way for ever
        raise optuna.TrialPruned(outcome)

    def _check_errors(self) -> None:
        trials = self._trials()
        messages = [
            trial.user_attrs["message"] for trial in trials if "message" in trial.user_attrs
        ]
        if len(messages) >= _ERRORS and not _num_finished(trials):
            raise ConfigError(
                f"{len(messages)} settings were tried and none can be carried out: {messages[-1]}"
            )


def _num_finished(trials: Sequence[FrozenTrial]) -> int:
    return sum(trial.state is TrialState.COMPLETE for trial in trials)
