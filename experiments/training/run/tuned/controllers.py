"""From a tuned run's settings to its controller, and to where it starts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from autotune.constraints import Constraints
from autotune.decisions.file import DecisionLog
from autotune.online.logged_controller import LoggedController
from autotune.online.zen_auto import ZenAuto
from experiments.training.parts.setup import RunSetup, workload_of
from experiments.training.settings.training import TrainSettings
from sim.hardware.profile import HardwareProfile
from zenflow.controller import AbstractController
from zenflow.errors import ConfigError
from zenflow.host.limits import usable_cores
from zenflow.knobs import Knobs
from zenflow.provenance import hardware

if TYPE_CHECKING:
    from autotune.adviser.adviser import Adviser


def make_controller(setup: RunSetup, log: DecisionLog) -> AbstractController:
    """Return the controller that the settings name; it writes its decisions to ``log``.

    Raises:
        ConfigError: The model can't be simulated, the machine is unknown, or no setting meets the
            bounds.
    """
    settings, start = setup.settings, setup.config.update_interval
    if settings.controller == "zen-auto":
        alone = ZenAuto(start=start)
        return LoggedController(alone, log, by="zen-auto", reason=lambda: _why(alone))
    # Imported late, as below: a run that is not tuned needs no simulator.
    from autotune.online.controller import SIGMAS, TwinController

    adviser = setup.adviser or make_adviser(setup)
    largest = max(*adviser.space.update_intervals, start)
    return TwinController(
        adviser,
        sigma=SIGMAS[source_of(settings)],
        config=setup.config,
        total_steps=setup.total_steps,
        zen_auto=ZenAuto(start=start, largest=largest) if settings.controller == "both" else None,
        log=log,
        seed=settings.seed,
    )


def _why(zen_auto: ZenAuto) -> str:
    steps = zen_auto.wanted()
    if steps is None or math.isinf(steps):
        return "gradients that wait stay below the important ones"
    return f"gradients that wait are as large as the important ones after {steps:.1f} steps"


def make_adviser(setup: RunSetup) -> Adviser:
    """Return the adviser that searches for a tuned run's settings.

    Raises:
        ConfigError: The model can't be simulated, or the machine is unknown.
    """
    from autotune.adviser.adviser import Adviser
    from autotune.model.twin import Twin

    settings = setup.settings
    profile = machine_of(settings, is_cpu=setup.device.type == "cpu")
    releases = settings.gradients == "release"
    twin = Twin(workload_of(setup), profile, setup.config, releases=releases)
    return Adviser(twin, constraints=_constraints(setup))


def with_start_knobs(setup: RunSetup) -> RunSetup:
    """Return a tuned run at its preset's knobs, or at the nearest ones within its bounds.

    Raises:
        ConfigError: No setting keeps the bounds; the message says which two conflict.
    """
    if _constraints(setup) == Constraints():
        return setup
    adviser = make_adviser(setup)
    knobs = adviser.start(Knobs.of(setup.config))
    return replace(setup, config=knobs.applied_to(setup.config), adviser=adviser)


def _constraints(setup: RunSetup) -> Constraints:
    """Return the bounds that were given; without one a GPU's own memory is."""
    settings, device_bytes = setup.settings, setup.settings.device_memory
    if device_bytes is None and setup.device.type == "cuda":
        device_bytes = float(torch.cuda.get_device_properties(setup.device).total_memory)
    return Constraints(
        device_bytes=device_bytes,
        host_bytes=settings.host_memory,
        largest_staleness=settings.largest_staleness,
        smallest_captured=settings.smallest_captured,
    )


def source_of(settings: TrainSettings) -> str:
    """Return where the twin's machine comes from, by which its constants may be off."""
    if settings.profile is not None:
        return "calibrated"
    return "generic" if settings.hardware is None else "table"


def machine_of(settings: TrainSettings, *, is_cpu: bool) -> HardwareProfile:
    """Return the machine that the twin starts from.

    An emulated link's rates are known, whatever else is not.

    Args:
        settings: Of the run.
        is_cpu: Whether a CPU plays the device.

    Raises:
        ConfigError: The profile can't be read, the table has no such machine, or its device is
            not of the run's kind.
    """
    from sim.fitting.refine import on_link
    from sim.hardware.catalog import find_machine
    from sim.hardware.file import read_profile
    from sim.hardware.unknown import generic_cpu, generic_gpu

    if settings.profile is not None:
        found = read_profile(settings.profile)
    elif settings.hardware is not None:
        found = find_machine(settings.hardware, 1)
    elif is_cpu:
        found = generic_cpu(usable_cores(), float(hardware()["memory_bytes"]))
    else:
        found = generic_gpu()
    if found.device.is_cpu != is_cpu:
        kinds = {True: "a CPU", False: "a GPU"}
        raise ConfigError(
            f"{settings.profile or settings.hardware} is of {kinds[found.device.is_cpu]}, but the "
            f"run's device is {kinds[is_cpu]}: give a profile that zenflow calibrate made on it, "
            "or leave it out"
        )
    return on_link(found, settings.link)
