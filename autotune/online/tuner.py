"""Tuner: a tuned run's options, and from these to its first knobs and its controller.

Any loop can be tuned that says in a `TunedRun` what it trains: the command line's, or a Trainer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from os import PathLike
from typing import Any, get_args

from autotune.adviser.adviser import Adviser
from autotune.constraints import Constraints
from autotune.decisions.file import DecisionLog
from autotune.model.twin import Twin
from autotune.online.controller import SIGMAS, TwinController
from autotune.online.controllers import Controllers, untunable
from autotune.online.logged_controller import LoggedController
from autotune.online.zen_auto import ZenAuto
from sim.fitting.refine import on_link
from sim.hardware.catalog import find_machine
from sim.hardware.file import read_profile
from sim.hardware.profile import HardwareProfile
from sim.hardware.unknown import generic_cpu, generic_gpu
from sim.models.workload import Workload
from zenflow.config import ZenFlowConfig, raise_violations, unknown_name
from zenflow.controller import AbstractController
from zenflow.errors import ConfigError
from zenflow.host.limits import usable_cores
from zenflow.knobs import Knobs
from zenflow.provenance import hardware


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedRun:
    """Facts of a run that the tuner must know."""

    config: ZenFlowConfig
    """Configuration at the start; what no knob changes stays."""
    workload: Callable[[], Workload]
    """Function that returns model and batch, or raises a ``ConfigError`` where the simulator does
    not know the model; called for the twin alone."""
    total_steps: int
    """Number of steps of the run."""
    settings: Mapping[str, Any]
    """Settings of the run, JSON-ready, for its decisions file."""
    gpu_bytes: float | None
    """Memory of the GPU that trains; None where a CPU plays the device."""
    releases: bool
    """Whether gradients leave during backward."""
    link: tuple[float, float] | None = None
    """Rates of an emulated link in bytes/s, device to host and back; None on a real one."""
    seed: int = 0
    """Seed of the searches."""
    adviser: Adviser | None = None
    """Adviser that chose the first knobs; None where the configuration's own were taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuner:
    """Options of a tuned run: who chooses knobs, within which bounds, and from what machine on.

    `ZenFlowTrainer(auto={...})` takes them by name, those of `Constraints` included.

    Raises:
        ConfigError: An option breaks its rule.

    Examples:
        >>> tuner = Tuner.of({"largest_staleness": 8, "hardware": "hgx-h100"})
        >>> tuner.controller, tuner.constraints.largest_staleness, tuner.source
        ('both', 8, 'table')
    """

    controller: Controllers = "both"
    """Who chooses: the simulator's twin of the run, zen-auto (S alone), or both."""
    constraints: Constraints = field(default_factory=Constraints)
    """Bounds of every setting; device memory is bounded by a GPU's own where nothing is said."""
    profile: str | PathLike[str] | None = None
    """File of `zenflow calibrate` that the twin starts from."""
    hardware: str | None = None
    """Machine of the simulator's table that the twin starts from."""

    def __post_init__(self) -> None:
        """Check the options."""
        raise_violations("the tuner", list(self._violations()))

    def _violations(self) -> Iterator[str]:
        known = get_args(Controllers)
        if self.controller not in known:
            yield f"controller {unknown_name(self.controller, known)}"
        given = {
            "bounds": self.constraints != Constraints(),
            "profile": self.profile is not None,
            "hardware": self.hardware is not None,
        }
        if self.controller == "zen-auto" and any(given.values()):
            names = ", ".join(name for name, is_given in given.items() if is_given)
            yield f"{names} can't be had with controller 'zen-auto', which has no twin"
        if self.profile is not None and self.hardware is not None:
            yield (
                "profile and hardware both say what the machine is: give the profile alone, which "
                "was measured on it"
            )

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Tuner:
        """Return the tuner of options by name, those of `Constraints` among them.

        Raises:
            ConfigError: A name is unknown, or an option breaks its rule.
        """
        bounds = [item.name for item in fields(Constraints)]
        own = [item.name for item in fields(cls) if item.name != "constraints"]
        for name in options:
            if name not in (*own, *bounds):
                raise ConfigError(f"auto has no option {unknown_name(name, [*own, *bounds])}")
        return cls(
            constraints=Constraints(**{n: v for n, v in options.items() if n in bounds}),
            **{n: v for n, v in options.items() if n in own},
        )

    @property
    def has_twin(self) -> bool:
        """Whether the simulator's twin chooses."""
        return self.controller != "zen-auto"

    @property
    def source(self) -> str:
        """Where the twin's machine comes from, by which its constants may be off."""
        if self.profile is not None:
            return "calibrated"
        return "generic" if self.hardware is None else "table"

    def machine(self, run: TunedRun) -> HardwareProfile:
        """Return the machine that the twin starts from.

        An emulated link's rates are known, whatever else is not.

        Raises:
            ConfigError: The profile can't be read, the table has no such machine, or its device is
                not of the run's kind.
        """
        is_cpu = run.gpu_bytes is None
        if self.profile is not None:
            found = read_profile(self.profile)
        elif self.hardware is not None:
            found = find_machine(self.hardware, 1)
        elif is_cpu:
            found = generic_cpu(usable_cores(), float(hardware()["memory_bytes"]))
        else:
            found = generic_gpu()
        if found.device.is_cpu != is_cpu:
            kinds = {True: "a CPU", False: "a GPU"}
            raise ConfigError(
                f"{self.profile or self.hardware} is of {kinds[found.device.is_cpu]}, but the "
                f"run's device is {kinds[is_cpu]}: give a profile that zenflow calibrate made on "
                "it, or leave it out"
            )
        return on_link(found, run.link)

    def starting(self, run: TunedRun) -> TunedRun:
        """Return the run at its own knobs, or at the nearest ones within the bounds.

        Raises:
            ConfigError: There is nothing to choose, the model can't be simulated, the machine is
                unknown, or no setting keeps the bounds; the message says which two conflict.
        """
        raise_violations("a tuned run", list(untunable(self.controller, run.config)))
        if self._bounds(run) == Constraints():
            return run
        adviser = self._adviser(run)
        knobs = adviser.start(Knobs.of(run.config))
        return replace(run, config=knobs.applied_to(run.config), adviser=adviser)

    def make_controller(self, run: TunedRun, log: DecisionLog) -> AbstractController:
        """Return the controller of a run; it writes its decisions to ``log``.

        Raises:
            ConfigError: The model can't be simulated, the machine is unknown, or no setting meets
                the bounds.
        """
        start = run.config.update_interval
        if not self.has_twin:
            alone = ZenAuto(start=start)
            return LoggedController(alone, log, by="zen-auto", reason=lambda: _why(alone))
        adviser = run.adviser or self._adviser(run)
        largest = max(*adviser.space.update_intervals, start)
        return TwinController(
            adviser,
            sigma=SIGMAS[self.source],
            config=run.config,
            total_steps=run.total_steps,
            zen_auto=ZenAuto(start=start, largest=largest) if self.controller == "both" else None,
            log=log,
            seed=run.seed,
        )

    def _adviser(self, run: TunedRun) -> Adviser:
        twin = Twin(run.workload(), self.machine(run), run.config, releases=run.releases)
        return Adviser(twin, constraints=self._bounds(run))

    def _bounds(self, run: TunedRun) -> Constraints:
        if not self.has_twin or self.constraints.device_bytes is not None:
            return self.constraints
        return replace(self.constraints, device_bytes=run.gpu_bytes)


def _why(zen_auto: ZenAuto) -> str:
    steps = zen_auto.wanted()
    if steps is None or math.isinf(steps):
        return "gradients that wait stay below the important ones"
    return f"gradients that wait are as large as the important ones after {steps:.1f} steps"
