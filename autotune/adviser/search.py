"""Search: an Optuna study over the refitted twin that begins with the best bounds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import islice

import optuna

from autotune.adviser.forecasts import Forecasts
from autotune.adviser.messages import ForecastedSetting
from autotune.constraints import Feasibility
from autotune.model.twin import Twin
from autotune.space import SearchSpace
from sim.timing.host_passes import window_bytes
from zenflow.knobs import Knobs

_RANKED_SHARE = 2 / 3
"""Share of the trials that are settings in the order of their bounds; the sampler has the rest."""


def search(
    forecasts: Forecasts, space: SearchSpace, feasibility: Feasibility, until: float = math.inf
) -> list[ForecastedSetting]:
    """Return the settings that a study has looked at, each once.

    They differ in k and S; each comes with the ``select_interval`` that suits it.

    Args:
        forecasts: By the question's evidence.
        space: Settings to choose from.
        feasibility: Which of them may be chosen.
        until: CPU time of this process at which the study ends, with at least one setting.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    question = forecasts.question
    sampler = optuna.samplers.TPESampler(seed=question.seed, n_startup_trials=8)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    count = max(1, round(_RANKED_SHARE * question.num_trials))
    for knobs in promising(forecasts, space, feasibility, count):
        study.enqueue_trial(space.indices_of(knobs))
    found: dict[Knobs, ForecastedSetting] = {}
    for _ in range(question.num_trials):
        if found and time.process_time() >= until:
            break
        trial = study.ask()
        chosen = space.suggest_indices(trial)
        knobs = replace(chosen, select_interval=question.here.select_interval)
        if knobs not in found:
            if not feasibility.allows(knobs):
                study.tell(trial, state=optuna.trial.TrialState.PRUNED)
                continue
            found[knobs] = forecasts.setting(knobs)
        study.tell(trial, found[knobs].gain)
    return list(found.values())


def promising(
    forecasts: Forecasts, space: SearchSpace, feasibility: Feasibility, count: int
) -> list[Knobs]:
    """Return settings by an optimistic bound on their goodput, the best first.

    No step is shorter than its busiest lane, and what a lane carries is known in proportion: so a
    few simulations, of those with the best bounds, do the work of many.
    """
    here = forecasts.question.here
    busy = forecasts.forecast(here).busy_seconds
    load = lane_loads(forecasts.twin)

    def bound(knobs: Knobs) -> float:
        alike = replace(knobs, select_interval=here.select_interval)
        lanes = [busy["device"] + busy["step"], busy.get("launch", 0.0)]
        lanes += [
            busy.get(lane, 0.0) * of(knobs) / max(of(here), 1e-12) for lane, of in load.items()
        ]
        return math.log(forecasts.efficiency(alike)) - math.log(max(lanes))

    every = space.select_intervals[0]  # any one: how often to select is worked out for each
    settings = [knobs for knobs in space.grid() if knobs.select_interval == every]
    ranked = sorted(settings, key=lambda knobs: (-bound(knobs), str(knobs)))
    return list(islice((knobs for knobs in ranked if feasibility.allows(knobs)), count))


def update_share(knobs: Knobs, twin: Twin) -> float:
    """Return the share of updates in the host's traffic; the rest is intake of gradients."""
    intake, update = _window_bytes(knobs, twin)
    return update / (intake + update)


def _window_bytes(knobs: Knobs, twin: Twin) -> tuple[float, float]:
    """Return the host's bytes of a deferred element in one window: of intake and of update."""
    return window_bytes(knobs.applied_to(twin.config), twin.workload.dtype_bytes)


def lane_loads(twin: Twin) -> dict[str, Callable[[Knobs], float]]:
    """Return each lane's load per step and parameter, in units of its own, as functions."""
    return {
        "d2h": lambda k: 1.0 - k.topk_ratio,
        "h2d": lambda k: (1.0 - k.topk_ratio) / k.update_interval,
        "host": lambda k: (1.0 - k.topk_ratio) * sum(_window_bytes(k, twin)) / k.update_interval,
    }
