"""Tuning of ``zenflow train``: from its settings to the tuner, and to the controller of ranks.

The tuner is imported late: a run that is not tuned needs no simulator.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from autotune.decisions.file import DECISIONS, read_header
from autotune.online.tuning import Tuning, replayed
from experiments.output.progress import Reporter
from experiments.training.parts.setup import RunSetup, workload_of
from experiments.training.settings.tuning import TuningSettings
from zenflow.knobs import Knobs
from zenflow.optimizer import ZenFlowAdamW
from zenflow.surface.shared_controller import SharedController

if TYPE_CHECKING:
    from autotune.online.tuner import TunedRun, Tuner


def tuner_options(settings: TuningSettings) -> dict[str, Any]:
    """Return the options of the tuner that a tuned run's settings name."""
    return {
        "controller": settings.controller,
        "device_bytes": settings.device_memory,
        "host_bytes": settings.host_memory,
        "largest_staleness": settings.largest_staleness,
        "smallest_captured": settings.smallest_captured,
        "profile": settings.profile,
        "hardware": settings.hardware,
    }


def tuner_of(settings: TuningSettings) -> Tuner:
    """Return the tuner that a tuned run's settings name."""
    from autotune.online.tuner import Tuner

    return Tuner.of(tuner_options(settings))


def run_of(setup: RunSetup) -> TunedRun:
    """Return the facts of a run that its tuner must know."""
    from autotune.online.tuner import TunedRun

    settings = setup.settings
    return TunedRun(
        config=setup.config,
        workload=lambda: workload_of(setup),
        total_steps=setup.total_steps,
        settings=settings.to_dict(),
        gpu_bytes=gpu_bytes(setup.device),
        releases=settings.gradients == "release",
        link=settings.link,
        seed=settings.seed,
        adviser=setup.adviser,
    )


def gpu_bytes(device: torch.device) -> float | None:
    """Return the memory of a GPU; None of a CPU."""
    if device.type == "cpu":
        return None
    return float(torch.cuda.get_device_properties(device).total_memory)


def with_start(setup: RunSetup, folder: Path | None) -> RunSetup:
    """Return the run with the configuration that it starts, or started, from.

    A tuned run begins within its bounds. One that goes on, or is repeated, begins as it did,
    whatever would be chosen today.

    Args:
        setup: The run.
        folder: Of its results where it goes on; None for a new run.

    Raises:
        ConfigError: No setting keeps the bounds, or a decisions file can't be read.
    """
    if setup.settings.controller is None and setup.settings.replay is None:
        return setup
    found, saved = run_of(setup), None if folder is None else folder / DECISIONS
    if setup.ranks.is_first:  # ranks begin alike, whatever each of them would find
        found = begun(setup.settings, found, saved)
    return replace(setup, config=setup.ranks.of_first(found.config), adviser=found.adviser)


def begun(settings: TuningSettings, run: TunedRun, saved: Path | None) -> TunedRun:
    """Return a tuned run with the configuration that it starts, or started, from.

    Args:
        settings: Its settings.
        run: The run as it was given.
        saved: Decisions file of a run that goes on; None for a new one.

    Raises:
        ConfigError: No setting keeps the bounds, or a decisions file can't be read.
    """
    path = saved if settings.replay is None else Path(settings.replay)
    if path is None:
        return tuner_of(settings).starting(run)
    return replace(run, config=read_header(path).knobs.applied_to(run.config))


def tuning_of(setup: RunSetup, folder: Path, num_lines: int | None = None) -> Tuning | None:
    """Return a run's controller with its file open, or None for a run that has none.

    Args:
        setup: The run.
        folder: Of its results.
        num_lines: Lines that the file had at the checkpoint that the run goes on from; None for a
            new run.

    Raises:
        ConfigError: The settings can't be carried out, or the file is not the run's.
    """
    settings = setup.settings
    if settings.replay is not None:
        return replayed(Path(settings.replay), setup.total_steps)
    if settings.controller is None:
        return None
    if not setup.ranks.is_first:
        start = Knobs.of(setup.config)
        return Tuning(controller=SharedController(None), log=None, start=start)
    made = Tuning.begin(tuner_of(settings), run_of(setup), folder / DECISIONS, num_lines)
    if settings.parallel is not None:
        made.controller = SharedController(made.controller, last_step=setup.total_steps)
    return made


def tell_decisions(tuning: Tuning | None, optimizer: ZenFlowAdamW, reporter: Reporter) -> None:
    """Show the setting in force, and why it is another than before."""
    if tuning is None:
        return
    for decision in tuning.news():
        reporter.say(
            f"after step {decision.step}: {decision.new} ({decision.by}: {decision.reason})"
        )
    reporter.show_setting(str(tuning.knobs(optimizer)))
