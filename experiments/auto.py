"""What a tuned run has beside the training loop: its controller and its decisions file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.decisions import DECISIONS, Decision, DecisionLog, Header
from autotune.logged_controller import LoggedController
from experiments.build import Workbench, workload_of
from experiments.recipes import TrainSettings
from experiments.records import available_cores, hardware, provenance
from experiments.replay import replay_controller
from sim.hardware import HardwareProfile
from zenflow.controller import AbstractController
from zenflow.errors import CheckpointError, ConfigError
from zenflow.knobs import Knobs
from zenflow.optimizer import ZenFlowAdamW


@dataclass(slots=True, kw_only=True)
class Tuning:
    """The part of a run that changes its knobs."""

    controller: AbstractController
    log: DecisionLog | None
    """None in a replay, which decides nothing."""
    start: Knobs
    """In force from the first step on."""
    _told: int = field(default=0, init=False)

    @classmethod
    def of(cls, bench: Workbench, folder: Path, num_lines: int | None = None) -> Tuning | None:
        """Return a run's controller with its file open, or None for a run that has none.

        Args:
            bench: The run.
            folder: Of its results.
            num_lines: Lines that the file had at the checkpoint that the run goes on from; None
                for a new run.

        Raises:
            ConfigError: The settings can't be carried out, or the file is not the run's.
        """
        settings, start = bench.settings, Knobs.of(bench.config)
        if settings.replay is not None:
            controller = replay_controller(settings, bench.config, bench.total_steps)
            return cls(controller=controller, log=None, start=start)
        if settings.controller is None:
            return None
        log = DecisionLog(folder / DECISIONS)
        made = cls(controller=make_controller(bench, log), log=log, start=start)
        try:
            made._open(settings, num_lines)
        except BaseException:
            made.close()
            raise
        return made

    def _open(self, settings: TrainSettings, num_lines: int | None) -> None:
        assert self.log is not None
        header = Header(
            settings=settings.to_dict(),
            knobs=self.start,
            largest_interval=self.controller.largest_interval,
            **provenance(),
        )
        if num_lines is None:
            self.log.start(header)
        else:
            self.log.resume(num_lines, header)
            self._told = len(self.log.decisions)

    def knobs(self, optimizer: ZenFlowAdamW) -> Knobs:
        """Return the knobs in force."""
        decided = optimizer.decision_log
        return decided[-1][1] if decided else self.start

    def news(self) -> Sequence[Decision]:
        """Return the decisions taken since the last call."""
        if self.log is None:
            return ()
        taken = self.log.decisions[self._told :]
        self._told += len(taken)
        return taken

    def saved_lines(self, optimizer: ZenFlowAdamW) -> int | None:
        """Return how many lines a checkpoint builds on, once they are on the disk.

        Raises:
            CheckpointError: The file lacks decisions that the engine has carried out.
        """
        if self.log is None:
            return None
        written = [(decision.step, decision.new) for decision in self.log.decisions]
        if written != optimizer.decision_log:
            raise CheckpointError(
                f"{self.log.path} has {len(written)} decisions, but the optimizer has carried out "
                f"{len(optimizer.decision_log)}, so the run could not be repeated from it: the "
                "controller must write what it decides"
            )
        self.log.sync()
        return self.log.num_lines

    def end(self, step: int, run_seconds: float) -> None:
        """Write the end record of a run that has taken all its steps."""
        if self.log is not None:
            self.log.end(step=step, search_seconds=self.search_seconds, run_seconds=run_seconds)

    @property
    def search_seconds(self) -> float:
        """CPU seconds that the controller's search has taken."""
        return float(getattr(self.controller, "search_seconds", 0.0))

    def summary(self, optimizer: ZenFlowAdamW, run_seconds: float) -> dict[str, Any]:
        """Return what summary.json says of the tuning."""
        share = self.search_seconds / run_seconds if run_seconds else None
        return {
            "knobs": self.knobs(optimizer).to_dict(),
            "num_decisions": len(optimizer.decision_log),
            "last_decision_step": optimizer.decision_log[-1][0] if optimizer.decision_log else 0,
            "search_seconds": self.search_seconds,
            "search_share": share,
        }

    def close(self) -> None:
        """End the controller's search and close its file, which can then be resumed."""
        if self.log is not None:
            self.log.close()
        close = getattr(self.controller, "close", None)
        if close is not None:
            close()


def make_controller(bench: Workbench, log: DecisionLog) -> AbstractController:
    """Return the controller that the settings name; it writes its decisions to ``log``.

    Raises:
        ConfigError: The model can't be simulated, the machine is unknown, or no setting meets the
            bounds.
    """
    from autotune.zen_auto import ZenAuto

    settings = bench.settings
    if settings.controller == "zen-auto":
        return LoggedController(ZenAuto(), log, by="zen-auto")
    from autotune.constraints import Constraints
    from autotune.twin_controller import TwinController

    profile, sigma = machine_of(settings, is_cpu=bench.device.type == "cpu")
    return TwinController(
        workload=workload_of(bench),
        profile=profile,
        sigma=sigma,
        config=bench.config,
        releases=settings.gradients == "release",
        constraints=Constraints(
            device_bytes=settings.device_memory,
            host_bytes=settings.host_memory,
            largest_staleness=settings.largest_staleness,
            smallest_captured=settings.smallest_captured,
        ),
        total_steps=bench.total_steps,
        zen_auto=ZenAuto() if settings.controller == "both" else None,
        log=log,
        seed=settings.seed,
    )


def machine_of(settings: TrainSettings, *, is_cpu: bool) -> tuple[HardwareProfile, float]:
    """Return the machine that the twin starts from, and how far its constants may be off.

    An emulated link's rates are known, whatever else is not.

    Args:
        settings: Of the run.
        is_cpu: Whether a CPU plays the device.

    Returns:
        The machine, and the log-normal spread of its constants.

    Raises:
        ConfigError: The profile can't be read, the table has no such machine, or its device is
            not of the run's kind.
    """
    from autotune.twin_controller import SIGMAS
    from sim.catalog import find_machine
    from sim.generic import generic_cpu, generic_gpu
    from sim.profile_file import read_profile
    from sim.refine import on_link

    if settings.profile is not None:
        found, source = read_profile(settings.profile), "calibrated"
    elif settings.hardware is not None:
        found, source = find_machine(settings.hardware, 1), "table"
    elif is_cpu:
        found = generic_cpu(available_cores(), float(hardware()["memory_bytes"]))
        source = "generic"
    else:
        found, source = generic_gpu(), "generic"
    if found.device.is_cpu != is_cpu:
        kinds = {True: "a CPU", False: "a GPU"}
        raise ConfigError(
            f"{settings.profile or settings.hardware} is of {kinds[found.device.is_cpu]}, but the "
            f"run's device is {kinds[is_cpu]}: give a profile that zenflow calibrate made on it, "
            "or leave it out"
        )
    return on_link(found, settings.link), SIGMAS[source]
