"""Tuning of a run beside the training loop: its controller and its decisions file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autotune.decisions.file import DECISIONS, Decision, DecisionLog, Header, read_header
from experiments.training.parts.setup import RunSetup
from experiments.training.run.tuned.controllers import make_controller, with_start_knobs
from experiments.training.run.tuned.replay import replay_controller
from experiments.training.settings.training import TrainSettings
from zenflow.controller import AbstractController
from zenflow.errors import CheckpointError
from zenflow.knobs import Knobs
from zenflow.optimizer import ZenFlowAdamW
from zenflow.provenance import provenance
from zenflow.surface.shared_controller import SharedController


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
    settings = setup.settings
    if settings.replay is not None:
        knobs = read_header(Path(settings.replay)).knobs
    elif settings.controller is None:
        return setup
    elif folder is not None:
        knobs = read_header(folder / DECISIONS).knobs
    else:
        # Ranks begin alike, whatever each of them would find.
        found = with_start_knobs(setup) if setup.ranks.is_first else setup
        return replace(found, config=setup.ranks.of_first(found.config))
    return replace(setup, config=knobs.applied_to(setup.config))


@dataclass(slots=True, kw_only=True)
class Tuning:
    """The part of a run that changes its knobs."""

    controller: AbstractController
    log: DecisionLog | None
    """None in a replay, which decides nothing."""
    start: Knobs
    """Knobs in force from the first step on."""
    _told: int = field(default=0, init=False)

    @classmethod
    def of(cls, setup: RunSetup, folder: Path, num_lines: int | None = None) -> Tuning | None:
        """Return a run's controller with its file open, or None for a run that has none.

        Args:
            setup: The run.
            folder: Of its results.
            num_lines: Lines that the file had at the checkpoint that the run goes on from; None
                for a new run.

        Raises:
            ConfigError: The settings can't be carried out, or the file is not the run's.
        """
        settings, start = setup.settings, Knobs.of(setup.config)
        if settings.replay is not None:
            repeated = replay_controller(settings, setup.total_steps)
            return cls(controller=repeated, log=None, start=start)
        if settings.controller is None:
            return None
        if not setup.ranks.is_first:
            return cls(controller=SharedController(None), log=None, start=start)
        log = DecisionLog(folder / DECISIONS)
        controller = make_controller(setup, log)
        if settings.parallel is not None:
            controller = SharedController(controller, last_step=setup.total_steps)
        made = cls(controller=controller, log=log, start=start)
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

    def saved_lines(self, optimizer: ZenFlowAdamW, step: int) -> int | None:
        """Return how many lines a checkpoint of a step builds on, once they are on the disk.

        Raises:
            CheckpointError: The file lacks decisions that the engine has carried out.
        """
        if self.log is None:
            return None
        # What ranks have decided for the next step is written, and not carried out yet.
        written = [(made.step, made.new) for made in self.log.decisions if made.step <= step]
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
            searched = self.controller.search_seconds
            self.log.end(step=step, search_seconds=searched, run_seconds=run_seconds)

    def summary(self, optimizer: ZenFlowAdamW, run_seconds: float) -> dict[str, Any]:
        """Return the entries of summary.json on the tuning."""
        searched = self.controller.search_seconds
        return {
            "knobs": self.knobs(optimizer).to_dict(),
            "num_decisions": len(optimizer.decision_log),
            "last_decision_step": optimizer.decision_log[-1][0] if optimizer.decision_log else 0,
            "search_seconds": searched,
            "search_share": searched / run_seconds if run_seconds else None,
        }

    def close(self) -> None:
        """End the controller's search and close its file, which can then be resumed."""
        if self.log is not None:
            self.log.close()
        self.controller.close()
