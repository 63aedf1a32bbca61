"""Result: the best settings of a study so far, or the Pareto front."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from autotune.offline.objective import TrialMetrics, dominates
from autotune.offline.samplers import is_allowed
from autotune.offline.trial_loop import TuningTask
from autotune.space import INDEX_SUFFIX
from zenflow.knobs import Knobs

_FEWEST = 10
"""Least number of measured settings from which knobs' importance is estimated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A setting with its measured metrics. See `autotune.offline.study.tune`."""

    number: int
    """Number of the trial."""
    knobs: Knobs
    values: Mapping[str, float]
    """Value of each objective, by name."""
    measurement: TrialMetrics
    allowed: bool
    """Whether the setting meets all constraints, as measured."""

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneResult:
    """Best settings of a study, and every setting it has measured.

    See `autotune.offline.study.tune`.
    """

    task: TuningTask
    best: tuple[Candidate, ...]
    """The best setting, or the Pareto front, best by the first objective first; empty if no
    allowed setting has been measured."""
    default: Candidate | None
    """Setting before the study; None if it was not measured."""
    candidates: tuple[Candidate, ...]
    """Every setting that was measured, in the order of trials."""
    num_trials: Mapping[str, int]
    """Trials by outcome: measured, infeasible, repeated, surplus, error, interrupted, lost."""
    importance: Mapping[str, Mapping[str, float]]
    """Importance of each knob (PED-ANOVA), by objective and knob; empty where too few settings
    have been measured."""
    interrupted: bool
    """Whether a signal ended the study."""

    @property
    def is_complete(self) -> bool:
        """Whether as many settings have been measured as were asked for."""
        return len(self.candidates) >= self.task.num_trials


def result_of(study: optuna.Study, task: TuningTask, *, interrupted: bool = False) -> TuneResult:
    """Return the result of a study so far."""
    trials = study.get_trials(deepcopy=False)
    found = [_candidate(t, task) for t in trials if t.state is TrialState.COMPLETE]
    return TuneResult(
        task=task,
        best=_best(found, task),
        default=next((c for c in found if c.knobs == task.default), None),
        candidates=tuple(found),
        num_trials=Counter(map(outcome_of, trials)),
        importance=_importance(study, task) if len(found) >= _FEWEST else {},
        interrupted=interrupted,
    )


def outcome_of(trial: FrozenTrial) -> str:
    """Return a trial's outcome: its own word, running, waiting, or lost with its worker."""
    if not trial.state.is_finished():
        return trial.state.name.lower()
    said = str(trial.user_attrs.get("outcome", "lost"))
    is_lost = trial.state is TrialState.FAIL and said not in ("error", "interrupted")
    return "lost" if is_lost else said


def _importance(study: optuna.Study, task: TuningTask) -> dict[str, dict[str, float]]:
    """Return every knob's importance; the evaluator takes less for better."""
    found = {}
    for place, goal in enumerate(task.goals):
        sign = -1.0 if goal.is_maximised else 1.0

        def target(trial: FrozenTrial, place: int = place, sign: float = sign) -> float:
            return sign * float(trial.values[place])

        # Optuna loads this package of its own at first use, and scikit-learn with it.
        importance = optuna.importance
        shares = importance.get_param_importances(
            study, evaluator=importance.PedAnovaImportanceEvaluator(), target=target
        )
        found[goal.name] = {
            name.removesuffix(INDEX_SUFFIX): float(share) for name, share in shares.items()
        }
    return found


def _candidate(trial: FrozenTrial, task: TuningTask) -> Candidate:
    return Candidate(
        number=trial.number,
        knobs=Knobs.from_dict(trial.user_attrs["knobs"]),
        values=dict(zip(task.objectives, trial.values, strict=True)),
        measurement=TrialMetrics(**trial.user_attrs["measurement"]),
        allowed=is_allowed(trial),
    )


def _best(found: Sequence[Candidate], task: TuningTask) -> tuple[Candidate, ...]:
    """Return the allowed candidates that no other one dominates; of equal ones the first."""
    allowed = [(c, tuple(c.values[name] for name in task.objectives)) for c in found if c.allowed]
    front: dict[tuple[float, ...], Candidate] = {}
    for candidate, own in allowed:
        if not any(dominates(other, own, task.goals) for _, other in allowed):
            front.setdefault(own, candidate)
    first = task.goals[0]
    sign = -1 if first.is_maximised else 1
    return tuple(sorted(front.values(), key=lambda c: sign * c.values[first.name]))
