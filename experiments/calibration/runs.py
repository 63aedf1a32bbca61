"""Observed runs, as the simulator sees them: short trainings in turn, or recorded ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeAlias

from experiments.calibration.short_run import ShortRun, short_run
from experiments.training.parts.files.step_log import read_steps
from experiments.training.parts.ranks.ranks import ALONE, Ranks
from experiments.training.parts.setup import workload_of
from experiments.training.run.summary import whole_windows
from experiments.training.settings.sizes import MODEL_SIZES
from experiments.training.settings.training import TrainSettings
from sim.fitting.refine import Observation
from sim.models.workload import Workload
from sim.simulate import PASSES, Strategy
from zenflow.errors import ConfigError
from zenflow.trace.timeline import Timeline

WARM_STEPS = 2
"""Least steps at the start of each turn that are not timed.

What another run has left in the caches is gone by then.
"""

_Turn: TypeAlias = tuple[float, float, Mapping[str, float], Mapping[str, float]]
"""Seconds and stalled seconds of a turn's mean step, busy ones of lanes, and those of passes."""


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
    between: Callable[[], None] = lambda: None,
    together: int | None = None,
    ranks: Ranks = ALONE,
) -> list[ObservedRun]:
    """Return the steady state of every run.

    Runs take turns of a few whole windows, so that a noisy minute disturbs all of them and no
    median of any.

    Args:
        settings: Of the runs; ``timeline_steps`` is set here.
        turns: Of each run.
        windows: Of each turn.
        on_turn: Called after each.
        between: Called before all runs take their next turn.
        together: Runs that are in memory at a time; None is all.
        ranks: Processes that share each run, in the way that its settings say; all of them call.
    """
    size = together or max(1, len(settings))
    found: list[ObservedRun] = []
    for first in range(0, len(settings), size):
        own = settings[first : first + size]
        found += _observe(own, turns, windows, on_turn, between, ranks)
    return found


def _observe(
    settings: Sequence[TrainSettings],
    turns: int,
    windows: int,
    on_turn: Callable[[], None],
    between: Callable[[], None],
    ranks: Ranks,
) -> list[ObservedRun]:
    with ExitStack() as stack:
        runs = []
        for item in settings:
            window = item.config(None).update_interval
            length = max(4, windows * window)
            length += -length % window
            values = item.to_dict() | {"timeline_steps": length}
            timed = TrainSettings.from_dict(values)
            shared = replace(ranks, parallel=timed.parallel)
            runs.append((stack.enter_context(short_run(timed, ranks=shared)), length))
        for run, length in runs:
            for _ in range(max(4, length)):  # first windows have nothing to land
                run.step()
        taken: list[list[_Turn]] = [[] for _ in runs]
        for _ in range(turns):
            between()
            for (run, length), own in zip(runs, taken, strict=True):
                own.append(_take_turn(run, length))
                on_turn()
        return [_observed(run, own) for (run, _), own in zip(runs, taken, strict=True)]


def _take_turn(run: ShortRun, length: int) -> _Turn:
    config = run.setup.config
    # The turn before ended with empty queues: they fill up until an update has landed.
    for _ in range(max(WARM_STEPS, config.update_interval + config.effective_lag())):
        run.step()
    reports = run.reports(length)
    run.optimizer.synchronize()
    timeline = run.optimizer.timeline
    by_name = timeline.by_name()
    return (
        fmean(report.seconds for report in reports),
        fmean(report.stall_seconds for report in reports),
        {lane: timeline.busy(lane) / length for lane in timeline.lanes},
        {name: by_name["device", name] / length for name in PASSES},
    )


def _observed(run: ShortRun, turns: Sequence[_Turn]) -> ObservedRun:
    seconds, stalls, busy, passes = zip(*turns, strict=True)
    lanes = {lane for own in busy for lane in own}
    step = median(seconds)
    ordered = sorted(seconds)
    quarter = len(ordered) // 4
    busy_seconds = {lane: median(own.get(lane, 0.0) for own in busy) for lane in lanes}
    is_alone = run.setup.settings.parallel is None
    if not is_alone:  # forward and backward wait for collectives, and can't tell how long
        del busy_seconds["device"]
    return ObservedRun(
        settings=run.setup.settings,
        spread=(ordered[-1 - quarter] - ordered[quarter]) / step,
        observation=observation(
            run.setup.settings,
            workload_of(run.setup),
            step_seconds=step,
            stall_seconds=median(stalls) if is_alone else None,
            busy_seconds=busy_seconds,
            passes={name: median(own[name] for own in passes) for name in PASSES if is_alone},
        ),
    )


def observation_of(folder: Path) -> Observation:
    """Return the steady state of a recorded run.

    Step and stall are medians over the steps of whole windows; the lanes' times are the trace's.

    Raises:
        ConfigError: The directory lacks what a run leaves, or its model is not known by a size.
    """
    try:
        record = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        settings = TrainSettings.from_dict(record["settings"])
        rows = read_steps(folder / "steps.jsonl")
        timeline = Timeline.read(folder / "trace.json")
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{folder} is not a finished run's directory ({error}): give one with config.json, "
            "steps.jsonl and trace.json"
        ) from error
    if settings.model not in MODEL_SIZES:
        raise ConfigError(
            f"the run in {folder} is of {settings.model!r}: only models known by a size "
            f"({', '.join(MODEL_SIZES)}) can be simulated from a run's settings"
        )
    config = settings.config(None)
    steady = whole_windows(rows, config.update_interval, config.full_warm_up_rounds)
    steps = sorted({span.step for span in timeline.spans})
    inner = timeline.steps(steps[0] + 1, steps[-1])  # the first may be cut
    count = max(1, len(steps) - 1)
    return observation(
        settings,
        settings.workload(),
        step_seconds=median(row["seconds"] for row in steady),
        stall_seconds=median(row["stall_seconds"] for row in steady),
        busy_seconds={lane: inner.busy(lane) / count for lane in inner.lanes},
    )


def observation(settings: TrainSettings, workload: Workload, **figures: Any) -> Observation:
    """Return a run as the simulator needs it, with its measured numbers."""
    return Observation(
        label=label_of(settings),
        workload=workload,
        strategy=Strategy(
            name=settings.strategy,
            config=settings.config(None),
            releases=settings.gradients == "release",
            parallel=settings.parallel or "ddp",
        ),
        link=settings.link,
        **figures,
    )


def label_of(settings: TrainSettings) -> str:
    """Return a run's settings in a line."""
    config = settings.config(None)
    parts = [settings.strategy, settings.model, f"{settings.batch_size}x{settings.sequence}"]
    if settings.strategy.startswith("zenflow"):
        parts.append(f"k={config.topk_ratio:g} S={config.update_interval}")
    if config.queue_depth is not None:
        parts.append(f"q={config.queue_depth}")
    if settings.grad_accum > 1:
        parts.append(f"accum={settings.grad_accum}")
    if settings.gradients == "keep":
        parts.append("keep")
    if settings.parallel is not None:
        parts.append(settings.parallel)
    if settings.link is not None:
        parts.append(f"{settings.link[0] / 1e6:.0f}/{settings.link[1] / 1e6:.0f} MB/s")
    return " ".join(parts)
