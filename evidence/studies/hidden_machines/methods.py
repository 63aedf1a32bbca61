"""Ways to tune a run while it goes on: what each chooses next, given what was measured.

None of them sees more than the model, the machine's table entry, and the stretches it caused.
"""

from __future__ import annotations

import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import optuna

from autotune.adviser.adviser import Adviser
from autotune.constraints import Constraints, Feasibility, needs_of
from autotune.efficiency import FITTED, EnergyCurve
from autotune.model.stretch import Stretch
from autotune.model.twin import Twin
from autotune.offline.samplers import make_sampler
from autotune.offline.storage import quiet_optuna
from autotune.online.trial_rules import TrialRules
from autotune.space import SearchSpace
from evidence.studies.hidden_machines.machine import CONFIG, SIGMA, case_of
from sim.hardware.profile import HardwareProfile
from sim.models.workload import Workload
from zenflow.errors import ConfigError
from zenflow.knobs import Knobs

START = Knobs.of(CONFIG)
_ASKS = 20
"""Suggestions in a row that don't fit the machine, after which a random one that does is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Facts that every method knows before the run."""

    workload: Workload
    profile: HardwareProfile
    space: SearchSpace
    constraints: Constraints
    settings: tuple[Knobs, ...]
    """Settings of the space that fit the machine's memory."""
    num_windows: int
    """Stretches that will be measured."""
    num_trials: int
    """Number of trials of the twin's search, for each question."""
    seed: int

    @classmethod
    def of(cls, seed: int, space: SearchSpace, num_windows: int, num_trials: int) -> Problem:
        """Return the problem of a seed's case.

        Raises:
            ConfigError: The default setting is not in the space or does not fit the machine.
        """
        case = case_of(seed)
        workload, profile = case.workload, case.profile
        constraints = Constraints().within(profile)
        feasibility = Feasibility(constraints, needs_of(workload, profile, base=CONFIG), space)
        settings = tuple(knobs for knobs in space.grid() if feasibility.allows(knobs))
        if START not in settings:
            raise ConfigError(
                f"the default must be among the settings that fit, but {START} is not for {case}: "
                "add it to the space, or take another case"
            )
        return cls(
            workload=workload,
            profile=profile,
            space=space,
            constraints=constraints,
            settings=settings,
            num_windows=num_windows,
            num_trials=num_trials,
            seed=seed,
        )

    @property
    def twin(self) -> Twin:
        """A simulator by the table."""
        return Twin(self.workload, self.profile, CONFIG)


class AbstractMethod(ABC):
    """Chooses the setting of one stretch after the other."""

    @abstractmethod
    def next_knobs(self) -> Knobs:
        """Return the setting that the next stretch is measured at."""

    def record(self, stretch: Stretch) -> None:  # noqa: B027 - some methods learn nothing
        """Take a measurement."""

    def final_knobs(self) -> Knobs:
        """Return the setting to go on with, once the last stretch is recorded."""
        return self.next_knobs()


class Fixed(AbstractMethod):
    """One setting for ever."""

    def __init__(self, knobs: Knobs) -> None:
        """Choose it."""
        self._knobs = knobs

    def next_knobs(self) -> Knobs:
        return self._knobs


class UncorrectedSimulator(AbstractMethod):
    """The best setting by the table, for ever."""

    def __init__(self, problem: Problem) -> None:
        """Simulate nothing yet."""
        self._problem = problem
        self._best: Knobs | None = None

    def next_knobs(self) -> Knobs:
        if self._best is None:
            twin, curve = self._problem.twin, EnergyCurve.default()

            def goodput(knobs: Knobs) -> float:
                rho = 1.0 - curve.captured(knobs.topk_ratio)
                return FITTED.of(knobs, rho) / twin.forecast(knobs).step_seconds

            self._best = max(self._problem.settings, key=goodput)
        return self._best


class TwinMethod(AbstractMethod):
    """The tuner with its adviser: the simulator, corrected by what is measured."""

    def __init__(self, problem: Problem) -> None:
        """Start in the default setting."""
        self._problem = problem
        self._adviser = Adviser(problem.twin, problem.space, problem.constraints)
        self._tuner = TrialRules(START, SIGMA)
        self._num_left = problem.num_windows

    def next_knobs(self) -> Knobs:
        if not self._tuner.stretches:
            self._ask()
        return self._tuner.here

    def record(self, stretch: Stretch) -> None:
        self._num_left -= 1
        move = self._tuner.record(stretch)
        if move is None and self._num_left and self._tuner.wants_advice:
            self._ask()

    def final_knobs(self) -> Knobs:
        return self._tuner.here

    def _ask(self) -> None:
        question = self._tuner.question(
            select_seconds=0.0,  # all settings select equally often
            num_trials=self._problem.num_trials,
            seed=self._problem.seed,
            stretches_left=self._num_left,
        )
        self._tuner.consider(self._adviser.advise(question))


class _BestMeasured(AbstractMethod):
    """Goes on in the end with the best that was measured."""

    def __init__(self) -> None:
        self._measured: list[tuple[float, Knobs]] = []

    def record(self, stretch: Stretch) -> None:
        self._measured.append((log_goodput(stretch), stretch.knobs))

    def final_knobs(self) -> Knobs:
        return max(self._measured, key=lambda item: item[0])[1]


class RandomSearch(_BestMeasured):
    """The default first, then any setting that fits."""

    def __init__(self, problem: Problem) -> None:
        """Draw nothing yet."""
        super().__init__()
        self._rng = np.random.default_rng([problem.seed, 2])
        self._settings = problem.settings

    def next_knobs(self) -> Knobs:
        if not self._measured:
            return START
        return self._settings[self._rng.integers(len(self._settings))]


class SamplerSearch(_BestMeasured):
    """An Optuna sampler on measured goodput: a stretch is a trial, the default's the first.

    What a setting needs of memory is known: a suggestion that does not fit costs no stretch. The
    sampler is told the worst goodput seen for it, and asked again.
    """

    def __init__(self, problem: Problem, sampler: str) -> None:
        """Make the study.

        Args:
            problem: What is tuned.
            sampler: One of `autotune.offline.samplers.SAMPLERS`.
        """
        super().__init__()
        self._space, self._settings = problem.space, frozenset(problem.settings)
        self._rng = np.random.default_rng([problem.seed, 3])
        if sampler == "gp":  # it loads them when it needs them, which is no searching
            importlib.import_module("torch")
            importlib.import_module("scipy.optimize")
        with quiet_optuna():
            self._study = optuna.create_study(
                direction="maximize",
                sampler=make_sampler(sampler, problem.seed, is_constrained=False),
            )
        self._study.enqueue_trial(self._space.indices_of(START))
        self._trial: optuna.Trial | None = None

    def next_knobs(self) -> Knobs:
        with quiet_optuna():
            for _ in range(_ASKS):
                self._trial = self._study.ask()
                knobs = self._space.suggest_indices(self._trial)
                if knobs in self._settings:
                    return knobs
                self._study.tell(self._trial, min(value for value, _ in self._measured))
            fitting = sorted(self._settings, key=str)
            self._study.enqueue_trial(
                self._space.indices_of(fitting[self._rng.integers(len(fitting))])
            )
            self._trial = self._study.ask()
            return self._space.suggest_indices(self._trial)

    def record(self, stretch: Stretch) -> None:
        assert self._trial is not None
        with quiet_optuna():
            self._study.tell(self._trial, log_goodput(stretch))
        super().record(stretch)


METHODS: Mapping[str, Callable[[Problem], AbstractMethod]] = {
    "twin": TwinMethod,
    "random": RandomSearch,
    "TPE": lambda problem: SamplerSearch(problem, "tpe"),
    "GP": lambda problem: SamplerSearch(problem, "gp"),
    "uncorrected simulator": UncorrectedSimulator,
    "default": lambda problem: Fixed(START),
}
"""Methods by name; the last one is what tuning has to beat."""


def log_goodput(stretch: Stretch) -> float:
    """Return the log of a stretch's measured goodput."""
    return math.log(FITTED.of(stretch.knobs, stretch.rho) / stretch.step_seconds)
