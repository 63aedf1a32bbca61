"""Validation: predicted against measured, on runs that calibrated nothing; from records too."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.training.settings import TrainSettings
from sim.fitting.refine import Observation, predict
from sim.hardware.profile import HardwareProfile
from sim.simulate import Prediction, Strategy
from zenflow.errors import ConfigError

RECORD = "runs.json"
PROFILE = "profile.json"
TABLE = "table.txt"
PICTURE = "errors.png"
LANES = ("device", "d2h", "h2d", "host")
_FORMAT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Validated:
    """One run, measured and predicted."""

    observation: Observation
    spread: float
    """Spread of the measurement: interquartile range of turns over their median."""
    prediction: Prediction

    @property
    def error(self) -> float:
        """Predicted step time over measured, minus 1."""
        return self.prediction.step_seconds / self.observation.step_seconds - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """What all runs say together; shares, not per cent."""

    runs: int
    median: float
    """Median of the absolute errors of step time."""
    p90: float
    worst: float
    rank_correlation: float
    """Spearman's, of predicted and measured step times."""
    stall_median: float
    """Median absolute error of stall, as a share of the measured step."""
    lanes: Mapping[str, float]
    """The same for each lane's busy time."""

    def __str__(self) -> str:
        """Return a few lines for people."""
        lanes = ", ".join(f"{lane} {share:.1%}" for lane, share in self.lanes.items())
        return (
            f"{self.runs} runs: step time off by {self.median:.1%} (median), {self.p90:.1%} (90th "
            f"percentile), {self.worst:.1%} (worst); rank correlation "
            f"{self.rank_correlation:.3f}\n"
            f"of a step: stall off by {self.stall_median:.1%} (median); busy time {lanes}"
        )


def validate(
    profile: HardwareProfile, observed: Sequence[tuple[Observation, float]]
) -> list[Validated]:
    """Return what a profile predicts for observed runs, beside what was measured.

    Args:
        profile: Calibrated on other runs.
        observed: Runs, each with the spread of its measurement.
    """
    return [
        Validated(observation=item, spread=spread, prediction=predict(profile, item))
        for item, spread in observed
    ]


def errors_of(runs: Sequence[Validated]) -> Errors:
    """Return the runs' errors together.

    Raises:
        ConfigError: There are no runs.
    """
    if not runs:
        raise ConfigError("a validation needs runs: the record holds none")
    off = np.abs([run.error for run in runs])
    stalls = [
        abs(run.prediction.stall_seconds - run.observation.stall_seconds)
        / run.observation.step_seconds
        for run in runs
    ]
    return Errors(
        runs=len(runs),
        median=float(np.median(off)),
        p90=float(np.quantile(off, 0.9)),
        worst=float(off.max()),
        rank_correlation=rank_correlation(
            [run.observation.step_seconds for run in runs],
            [run.prediction.step_seconds for run in runs],
        ),
        stall_median=float(np.median(stalls)),
        lanes={lane: float(np.median(_lane_errors(runs, lane))) for lane in LANES},
    )


def _lane_errors(runs: Sequence[Validated], lane: str) -> list[float]:
    """Return each run's error of a lane's busy time, as a share of the measured step."""
    return [
        abs(run.prediction.busy_seconds.get(lane, 0.0) - seconds) / run.observation.step_seconds
        for run in runs
        if (seconds := run.observation.busy_seconds.get(lane)) is not None
    ] or [0.0]


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Return Spearman's rank correlation; NaN where one side does not vary.

    >>> round(rank_correlation([1, 2, 3, 4], [10, 20, 40, 30]), 3)
    0.8
    """
    first, second = (np.argsort(np.argsort(values)) for values in (a, b))
    if len(a) < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return float("nan")
    return float(np.corrcoef(first, second)[0, 1])


def table(runs: Sequence[Validated]) -> str:
    """Return the runs, one a line, and the errors of all."""
    width = max(len(run.observation.label) for run in runs)
    header = f"{'run':<{width}}{'step ms':>9}{'predicted':>10}{'error':>8}{'spread':>8}"
    header += f"{'stall ms':>10}{'predicted':>10}"
    header += "".join(f"{lane + ' ms':>12}{'predicted':>10}" for lane in LANES)
    lines = [header]
    for run in runs:
        seen, told = run.observation, run.prediction
        line = f"{seen.label:<{width}}{seen.step_seconds * 1e3:>9.1f}"
        line += f"{told.step_seconds * 1e3:>10.1f}{run.error:>+8.1%}{run.spread:>8.1%}"
        line += f"{seen.stall_seconds * 1e3:>10.1f}{told.stall_seconds * 1e3:>10.1f}"
        for lane in LANES:
            line += f"{_milliseconds(seen.busy_seconds.get(lane)):>12}"
            line += f"{_milliseconds(told.busy_seconds.get(lane)):>10}"
        lines.append(line)
    return "\n".join([*lines, str(errors_of(runs))])


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f}"


def record_of(
    observed: Sequence[tuple[TrainSettings, Observation, float]], provenance: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the measured runs, JSON-ready: what predictions are computed from again."""
    return {
        "format": _FORMAT,
        "runs": [
            {
                "label": item.label,
                "settings": settings.to_dict(),
                "step_seconds": item.step_seconds,
                "stall_seconds": item.stall_seconds,
                "busy_seconds": dict(item.busy_seconds),
                "spread": spread,
            }
            for settings, item, spread in observed
        ],
        **provenance,
    }


def is_former(folder: Path) -> bool:
    """Return whether a record is of the former update rule: nothing can be predicted of it."""
    return bool(json.loads((folder / RECORD).read_text(encoding="utf-8"))["format"] < _FORMAT)


def read_record(folder: Path) -> list[tuple[Observation, float]]:
    """Return the measured runs of a record.

    Raises:
        ConfigError: The record can't be read, or is of another format.
    """
    path = folder / RECORD
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            raise ConfigError(
                f"{path} has format {content['format']}, and this version reads {_FORMAT}: "
                "validate again"
            )
        return [(_observation(run), float(run["spread"])) for run in content["runs"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is no record of a validation ({type(error).__name__}: {error}): give the "
            "folder that zenflow validate wrote"
        ) from error


def _observation(run: Mapping[str, Any]) -> Observation:
    settings = TrainSettings.from_dict(run["settings"])
    return Observation(
        label=run["label"],
        workload=settings.workload(),
        strategy=Strategy(
            name=settings.strategy,
            config=settings.config(None),
            releases=settings.gradients == "release",
        ),
        step_seconds=run["step_seconds"],
        stall_seconds=run["stall_seconds"],
        busy_seconds=run["busy_seconds"],
        link=settings.link,
    )
