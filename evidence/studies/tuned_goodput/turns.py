"""Trainings side by side, for comparing settings and tuners step by step on one machine."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean

import torch

from autotune.efficiency import FITTED
from autotune.model.stretch import robust_mean
from autotune.online.stretches import settling_steps, stretch_steps
from autotune.space import SearchSpace
from experiments.calibration.short_run import ShortRun, short_run
from experiments.training.settings.training import TrainSettings
from zenflow.controller import AbstractController
from zenflow.knobs import Knobs
from zenflow.report import StepReport

_SPACE = SearchSpace()


class Scripted(AbstractController):
    """Does what it is told: the knobs of its attribute ``wanted``."""

    least_topk_ratio = min(_SPACE.topk_ratios)
    largest_interval = max(_SPACE.update_intervals)

    def __init__(self, wanted: Knobs) -> None:
        """Want these knobs."""
        self.wanted = wanted

    def next_knobs(self, step: int, report: StepReport | None, knobs: Knobs) -> Knobs:
        """Return the wanted knobs."""
        return self.wanted


@dataclass(slots=True)
class Taken:
    """Steps taken, by the clock around them."""

    seconds: list[float] = field(default_factory=list)
    worth: list[float] = field(default_factory=list)
    """Statistical efficiency of each."""
    captured: list[float] = field(default_factory=list)

    @property
    def progress(self) -> float:
        """Steps of AdamW's worth per second: goodput over the tokens of a step."""
        return sum(self.worth) / sum(self.seconds)

    def extend(self, other: Taken) -> None:
        """Add steps taken later."""
        self.seconds += other.seconds
        self.worth += other.worth
        self.captured += other.captured


class Side:
    """One training that takes turns with others.

    Attributes:
        optimizer: The engine.
    """

    def __init__(self, run: ShortRun) -> None:
        """Take the training over where it is."""
        self._run = run
        self._start = Knobs.of(run.setup.config)
        self.optimizer = run.optimizer

    @property
    def knobs(self) -> Knobs:
        """Knobs in force."""
        log = self.optimizer.decision_log
        return log[-1][1] if log else self._start

    def take(self, count: int) -> Taken:
        """Take steps and return what they took and were worth."""
        done = Taken()
        for _ in range(count):
            knobs = self.knobs
            started = time.perf_counter()
            self._run.step()
            done.seconds.append(time.perf_counter() - started)
            report = self.optimizer.report
            assert report is not None
            done.captured.append(report.captured_energy)
            done.worth.append(FITTED.of(knobs, 1.0 - min(1.0, report.captured_energy)))
        return done


@contextmanager
def side(settings: TrainSettings, controller: AbstractController) -> Iterator[Side]:
    """Yield a side and end its threads, whatever happened."""
    torch.manual_seed(settings.seed)
    with short_run(settings, controller) as run:
        yield Side(run)


@dataclass(frozen=True, slots=True)
class GridPoint:
    """A fixed setting as measured."""

    knobs: Knobs
    step_seconds: float
    rho: float

    @property
    def progress(self) -> float:
        """Steps of AdamW's worth per second."""
        return FITTED.of(self.knobs, self.rho) / self.step_seconds


def measure_grid(settings: TrainSettings, grid: Sequence[Knobs]) -> list[GridPoint]:
    """Return the seconds of every setting, in one training that goes from each to the next."""
    points = []
    script = Scripted(Knobs.of(settings.config(None)))
    with side(settings, script) as run:
        run.take(8)
        for knobs in grid:
            before, script.wanted = run.knobs, knobs
            resized = knobs.topk_ratio != before.topk_ratio
            run.take(before.update_interval + settling_steps(knobs))
            if resized:
                run.take(knobs.update_interval)
            taken = run.take(stretch_steps(knobs))
            mean, _ = robust_mean(taken.seconds, knobs.update_interval)
            rho = 1.0 - sum(taken.captured) / len(taken.captured)
            points.append(GridPoint(knobs=knobs, step_seconds=mean, rho=rho))
    return points


_FINALISTS, ROUNDS = 5, 4


def champion(
    settings: TrainSettings, grid: Sequence[GridPoint], rounds: int = ROUNDS
) -> GridPoint:
    """Return the best of a grid, the foremost measured again, in both orders.

    The largest of many noisy figures is mostly a lucky one: by what it was found does not count.
    """
    foremost = sorted(grid, key=lambda point: -point.progress)[:_FINALISTS]
    order = [point.knobs for point in foremost]
    again = [
        point
        for number in range(rounds)
        for point in measure_grid(settings, order[:: 1 if number % 2 else -1])
    ]
    means = []
    for knobs in order:
        own = [point for point in again if point.knobs == knobs]
        means.append(
            GridPoint(
                knobs,
                fmean(point.step_seconds for point in own),
                fmean(point.rho for point in own),
            )
        )
    return max(means, key=lambda point: point.progress)
