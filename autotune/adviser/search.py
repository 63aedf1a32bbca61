"""Search: an Optuna study over the refitted twin, begun where a bound promises most."""

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
    """Return what a study has looked at, each setting once.

    They differ in k, S, lag and rolling; each comes with the ``select_interval`` that suits it.

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
        knobs = _canonical(space.suggest_indices(trial), question.here.select_interval, space)
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
    few simulations, of those with the best bounds, do the work of many. Next to the first come the
    one in force and the first itself with windows of the other kind: of these the bound knows
    least.
    """
    here = forecasts.question.here
    busy = forecasts.forecast(here).busy_seconds
    load = lane_loads(forecasts.twin)

    def bound(knobs: Knobs) -> float:
        alike = replace(knobs, select_interval=here.select_interval)
        lanes = [busy["device"] + busy["step"]]
        lanes += [
            busy.get(lane, 0.0) * of(knobs) / max(of(here), 1e-12) for lane, of in load.items()
        ]
        return math.log(forecasts.efficiency(alike)) - math.log(max(lanes))

    every = space.select_intervals[0]  # any one: how often to select is worked out for each
    settings = [knobs for knobs in space.grid() if knobs == _canonical(knobs, every, space)]
    ranked = sorted(settings, key=lambda knobs: (-bound(knobs), str(knobs)))
    first = next((knobs for knobs in ranked if feasibility.allows(knobs)), None)
    if first is not None:
        others = [
            replace(knobs, rolling=not knobs.rolling, select_interval=every)
            for knobs in (here, first)
        ]
        ranked = list(dict.fromkeys([first, *(o for o in others if o in settings), *ranked]))
    return list(islice((knobs for knobs in ranked if feasibility.allows(knobs)), count))


def _canonical(knobs: Knobs, select_interval: int, space: SearchSpace) -> Knobs:
    """Return a setting with this ``select_interval``; windows of one step end together anyhow."""
    rolling = knobs.rolling or (knobs.update_interval == 1 and True in space.rollings)
    return replace(knobs, rolling=rolling, select_interval=select_interval)


def update_share(knobs: Knobs, twin: Twin) -> float:
    """Return the share of the host's traffic that updates are, not the intake of gradients."""
    intake, update = _window_bytes(knobs, twin)
    return update / (intake + update)


def _window_bytes(knobs: Knobs, twin: Twin) -> tuple[int, int]:
    """Return the host's bytes of a deferred element in one window: of intake and of update."""
    return window_bytes(knobs.applied_to(twin.config), twin.workload.dtype_bytes)


def lane_loads(twin: Twin) -> dict[str, Callable[[Knobs], float]]:
    """Return what each lane carries per step and parameter, in units of its own."""
    return {
        "d2h": lambda k: 1.0 - k.topk_ratio,
        "h2d": lambda k: (1.0 - k.topk_ratio) / k.update_interval,
        "host": lambda k: (1.0 - k.topk_ratio) * sum(_window_bytes(k, twin)) / k.update_interval,
    }
