"""Calibration on recorded runs: the directories that ``zenflow train`` wrote."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from experiments.calibration.plans import workload_of_settings
from experiments.calibration.runs import label_of
from experiments.training.settings import MODEL_SIZES, TrainSettings
from experiments.training.step_log import read_steps
from experiments.training.summary import whole_windows
from sim.fitting.refine import Observation, Refinement, refine
from sim.hardware.profile import HardwareProfile
from sim.simulate import Strategy
from zenflow.errors import ConfigError
from zenflow.trace.timeline import Timeline


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
    return Observation(
        label=label_of(settings),
        workload=workload_of_settings(settings),
        strategy=Strategy(
            name=settings.strategy, config=config, releases=settings.gradients == "release"
        ),
        step_seconds=median(row["seconds"] for row in steady),
        stall_seconds=median(row["stall_seconds"] for row in steady),
        busy_seconds={lane: inner.busy(lane) / count for lane in inner.lanes},
        link=settings.link,
    )


def refine_on_runs(profile: HardwareProfile, folders: Sequence[Path]) -> Refinement:
    """Return the profile refined until it tells these runs.

    Raises:
        ConfigError: A directory can't be used.
    """
    return refine(profile, [observation_of(folder) for folder in folders])
