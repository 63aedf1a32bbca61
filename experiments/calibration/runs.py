"""Observed runs: several short trainings, step by step in turn, as the simulator sees them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import fmean, median

from experiments.calibration.short_run import ShortRun, short_run
from experiments.training.settings import TrainSettings
from experiments.training.setup import workload_of
from sim.fitting.refine import Observation
from sim.simulate import Strategy

WARM_STEPS = 2
"""Least steps at the start of each turn that are not timed.

What another run has left in the caches is gone by then.
"""


@dataclass(slots=True)
class _Collected:
    """One run's figures, a row for each turn."""

    steps: list[float] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)
    busy: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedRun:
    """A run's medians over its turns, and how far the turns lie apart."""

    settings: TrainSettings
    observation: Observation
    spread: float
    """Interquartile range of the turns' step times over their median."""


def observe(
    settings: Sequence[TrainSettings],
    *,
    turns: int,
    windows: int,
    on_turn: Callable[[], None],
    together: int | None = None,
) -> list[ObservedRun]:
    """Return the steady state of every run.

    Runs take turns of a few whole windows, so that a noisy minute disturbs all of them and no
    median of any.

    Args:
        settings: Of the runs; ``timeline_steps`` is set here.
        turns: Of each run.
        windows: Of each turn.
        on_turn: Called after each.
        together: Runs that are in memory at a time; None is all.
    """
    size = together or max(1, len(settings))
    found: list[ObservedRun] = []
    for first in range(0, len(settings), size):
        found += _observe(settings[first : first + size], turns, windows, on_turn)
    return found


def _observe(
    settings: Sequence[TrainSettings], turns: int, windows: int, on_turn: Callable[[], None]
) -> list[ObservedRun]:
    with ExitStack() as stack:
        runs = []
        for item in settings:
            window = item.config(None).update_interval
            length = max(4, windows * window)
            length += -length % window
            values = item.to_dict() | {"timeline_steps": length}
            runs.append((stack.enter_context(short_run(TrainSettings.from_dict(values))), length))
        for run, length in runs:
            for _ in range(max(4, length)):  # first windows have nothing to land
                run.step()
        found = [_Collected() for _ in runs]
        for _ in range(turns):
            for (run, length), collected in zip(runs, found, strict=True):
                _take_turn(run, length, collected)
                on_turn()
        return [_observed(run, item) for (run, _), item in zip(runs, found, strict=True)]


def _take_turn(run: ShortRun, length: int, collected: _Collected) -> None:
    config = run.setup.config
    # The turn before ended with empty queues: they fill up within a window and its lag.
    for _ in range(max(WARM_STEPS, config.update_interval + config.effective_lag())):
        run.step()
    reports = []
    for _ in range(length):
        run.step()
        report = run.optimizer.report
        assert report is not None
        reports.append(report)
    run.optimizer.synchronize()
    timeline = run.optimizer.timeline
    collected.steps.append(fmean(report.seconds for report in reports))
    collected.stalls.append(fmean(report.stall_seconds for report in reports))
    collected.busy.append({lane: timeline.busy(lane) / length for lane in timeline.lanes})


def _observed(run: ShortRun, collected: _Collected) -> ObservedRun:
    settings = run.setup.settings
    lanes = {lane for busy in collected.busy for lane in busy}
    workload = workload_of(run.setup)
    step = median(collected.steps)
    ordered = sorted(collected.steps)
    quarter = len(ordered) // 4
    return ObservedRun(
        settings=settings,
        spread=(ordered[-1 - quarter] - ordered[quarter]) / step,
        observation=Observation(
            label=label_of(settings),
            workload=workload,
            strategy=Strategy(
                name=settings.strategy,
                config=run.setup.config,
                releases=settings.gradients == "release",
            ),
            step_seconds=step,
            stall_seconds=median(collected.stalls),
            busy_seconds={
                lane: median(busy.get(lane, 0.0) for busy in collected.busy) for lane in lanes
            },
            link=settings.link,
        ),
    )


def label_of(settings: TrainSettings) -> str:
    """Return a run's settings in a line."""
    config = settings.config(None)
    parts = [settings.strategy, settings.model, f"{settings.batch_size}x{settings.sequence}"]
    if settings.strategy.startswith("zenflow"):
        lag = config.effective_lag()
        parts.append(f"k={config.topk_ratio:g} S={config.update_interval} lag={lag}")
    if settings.grad_accum > 1:
        parts.append(f"accum={settings.grad_accum}")
    if settings.gradients == "keep":
        parts.append("keep")
    if settings.link is not None:
        parts.append(f"{settings.link[0] / 1e6:.0f}/{settings.link[1] / 1e6:.0f} MB/s")
    return " ".join(parts)
