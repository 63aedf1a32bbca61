"""Contests on the real engine: a tuned run and fixed settings take turns on one machine.

So everything that tuning costs is in the comparison, and a machine that gets slower favours none.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from autotune.online.tuning import Tuning
from evidence.studies.tuned_goodput.turns import Scripted, Side, Taken, side
from experiments.training.parts.setup import build_setup
from experiments.training.run.tuned.tuning import run_of, tuner_of
from experiments.training.settings.training import TrainSettings
from zenflow.controller import AbstractController
from zenflow.knobs import Knobs
from zenflow.lanes.copies import PacedLink

BEGINNING = 12
"""Steps of every side that are not counted: memory is touched for the first time, queues fill. A
tuned run measures its start then and decides nothing yet."""
WARM = 6
"""Steps of a fixed setting in its turn beside a drifting run that are not counted."""
DRIFT = 4.0
DRIFT_TOTAL = 20_000
"""Steps of the run that these are the beginning of: what searching may cost goes by it."""
WITHIN = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Lengths of contests, in steps."""

    turns: int
    """Number of the tuned run's turns. After each, one of the two fixed settings takes one: all
    sides' caches are equally cold, and a machine whose speed wanders is nearly the same to all."""
    turn: int
    """Number of steps of a turn."""
    drift_steps: int
    """Number of steps before the link slows down, and after."""
    window: int
    """Number of steps that are compared at a time beside a drift."""


WHOLE = Lengths(turns=24, turn=100, drift_steps=600, window=20)
SHORT = Lengths(turns=2, turn=8, drift_steps=16, window=4)
"""Lengths in smoke tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """One tuned run beside two fixed settings."""

    link: str
    seed: int
    best: str
    """The grid's best setting."""
    final: str
    """Setting in which the tuned run ended."""
    tuned: float
    """Progress: steps of AdamW's worth per second, over the whole run."""
    fixed_best: float
    default: float
    num_decisions: int
    search_seconds: float
    run_seconds: float

    @property
    def of_best(self) -> float:
        """Goodput over the best fixed setting's."""
        return self.tuned / self.fixed_best

    @property
    def of_default(self) -> float:
        """Goodput over the defaults'."""
        return self.tuned / self.default

    @property
    def searched(self) -> float:
        """CPU time of searching over the run's time."""
        return self.search_seconds / self.run_seconds


def contest(
    settings: TrainSettings, link: str, best: Knobs, folder: Path, lengths: Lengths = WHOLE
) -> Contest:
    """Let a tuned run, the best fixed setting and the defaults take turns."""
    start = Knobs.of(settings.config(None))
    total = BEGINNING + lengths.turns * lengths.turn
    with ExitStack() as stack:
        controller = _tuner(replace(settings, controller="both", steps=total), folder, stack)
        tuned = stack.enter_context(side(settings, controller))
        sides = [stack.enter_context(side(settings, Scripted(knobs))) for knobs in (best, start)]
        for every in (tuned, *sides):
            every.take(BEGINNING)
        own, results = Taken(), (Taken(), Taken())
        for turn in range(lengths.turns):
            own.extend(tuned.take(lengths.turn))
            results[turn % 2].extend(sides[turn % 2].take(lengths.turn))
        return Contest(
            link=link,
            seed=settings.seed,
            best=str(best),
            final=str(tuned.knobs),
            tuned=own.progress,
            fixed_best=results[0].progress,
            default=results[1].progress,
            num_decisions=len(tuned.optimizer.decision_log),
            search_seconds=controller.search_seconds,
            run_seconds=sum(own.seconds),
        )


def drift(
    settings: TrainSettings,
    before: Knobs,
    after: Knobs,
    folder: Path,
    lengths: Lengths = WHOLE,
) -> dict[str, Any]:
    """Slow the link in mid-run; return when goodput is back near the new link's best.

    Args:
        settings: Over the link as it is at first.
        before: The best fixed setting over that link.
        after: The best one over the slower link.
        folder: Folder of decisions files.
        lengths: Numbers of steps.
    """
    assert settings.link is not None
    with ExitStack() as stack:
        total = replace(settings, controller="both", steps=DRIFT_TOTAL)
        controller = _tuner(total, folder, stack)
        tuned = stack.enter_context(side(settings, controller))
        script = Scripted(before)
        fixed = stack.enter_context(side(settings, script))
        fixed.take(4 * WARM)
        tuned.take(lengths.drift_steps - lengths.drift_steps // 4)
        regrets_before = _regrets(tuned, fixed, lengths.drift_steps // 4, lengths.window)
        for item in (tuned, fixed):
            item.optimizer.change_link(PacedLink(*(rate / DRIFT for rate in settings.link)))
        script.wanted = after
        fixed.take(4 * WARM)
        regrets = _regrets(tuned, fixed, lengths.drift_steps, lengths.window)
    back = next((i for i, _ in enumerate(regrets) if fmean(regrets[i : i + 5]) <= WITHIN), None)
    return {
        "regret_before": fmean(regrets_before),
        "regrets_by_window": regrets,
        "steps_per_window": lengths.window,
        "windows_until_back": back,
        "final": str(tuned.knobs),
        "search_seconds": controller.search_seconds,
        "total_steps": DRIFT_TOTAL,
    }


def _regrets(tuned: Side, fixed: Side, num_steps: int, window: int) -> list[float]:
    """Return by what share the fixed setting is ahead in each window, the two taking turns."""
    windows, beside = [], []
    for _ in range(num_steps // window):
        windows.append(tuned.take(window))
        fixed.take(WARM)
        beside.append(fixed.take(window))
    found = []
    for number, own in enumerate(windows):
        reference = Taken()
        for taken in beside[max(0, number - 2) : number + 3]:
            reference.extend(taken)
        found.append(reference.progress / own.progress - 1)
    return found


def _tuner(settings: TrainSettings, folder: Path, stack: ExitStack) -> AbstractController:
    """Return the controller that ``zenflow train --auto`` has, with its decisions file open."""
    folder.mkdir(parents=True, exist_ok=True)
    run = run_of(build_setup(settings))
    tuning = Tuning.begin(tuner_of(settings), run, folder / f"{time.time_ns()}.jsonl")
    stack.callback(tuning.close)
    return tuning.controller
