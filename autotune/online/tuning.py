"""Tuning of a run beside its training loop, whichever that is: controller and decisions file."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.decisions.file import (
    DECISIONS,
    Decision,
    DecisionLog,
    Header,
    read_decisions,
    read_header,
)
from zenflow.controller import AbstractController, LoggedDecisions
from zenflow.errors import CheckpointError, ConfigError
from zenflow.knobs import Knobs
from zenflow.provenance import provenance

if TYPE_CHECKING:
    from autotune.online.tuner import TunedRun, Tuner
    from zenflow.optimizer import ZenFlowAdamW

COMMAND = "command"
"""Entry of a run's settings that says how a command made the others: two may differ in it."""


@dataclass(slots=True, kw_only=True)
class Tuning:
    """The part of a run that changes its knobs."""

    controller: AbstractController
    """Controller that the optimizer asks."""
    log: DecisionLog | None
    """Decisions file; None in a replay, which decides nothing."""
    start: Knobs
    """Knobs in force from the first step on."""
    _told: int = field(default=0, init=False)

    @classmethod
    def begin(
        cls, tuner: Tuner, run: TunedRun, path: Path, num_lines: int | None = None
    ) -> Tuning:
        """Return a run's controller with its file open.

        Args:
            tuner: Options of the tuning.
            run: The run, with the configuration that it starts, or started, from.
            path: Decisions file of the run.
            num_lines: Lines that the file had at the checkpoint that the run goes on from; None
                for a new run.

        Raises:
            ConfigError: The options can't be carried out, or the file is not the run's.
        """
        log = DecisionLog(path)
        made = cls(controller=tuner.make_controller(run, log), log=log, start=Knobs.of(run.config))
        try:
            made._open(run.settings, num_lines)
        except BaseException:
            made.close()
            raise
        return made

    def _open(self, settings: Mapping[str, Any], num_lines: int | None) -> None:
        assert self.log is not None
        header = Header(
            settings=settings,
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

    @property
    def decisions(self) -> Sequence[Decision]:
        """Every decision of the run so far; none in a replay."""
        return () if self.log is None else self.log.decisions

    def news(self) -> Sequence[Decision]:
        """Return the decisions taken since the last call."""
        taken = self.decisions[self._told :]
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

    def save(self, optimizer: ZenFlowAdamW, step: int, folder: Path) -> None:
        """Put a copy of the file beside the other files of a step's checkpoint.

        Raises:
            CheckpointError: The file lacks decisions that the engine has carried out.
        """
        if self.saved_lines(optimizer, step) is not None:
            assert self.log is not None
            shutil.copyfile(self.log.path, folder / DECISIONS)

    def end(self, step: int, run_seconds: float) -> None:
        """Write the end record of a run that has taken all its steps."""
        if self.log is not None:
            searched = self.controller.search_seconds
            self.log.end(step=step, search_seconds=searched, run_seconds=run_seconds)

    def summary(self, optimizer: ZenFlowAdamW, run_seconds: float | None = None) -> dict[str, Any]:
        """Return the entries of a run's summary on its tuning."""
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


def resumed(tuner: Tuner, run: TunedRun, path: Path, folder: Path) -> Tuning:
    """Return the tuning of a run that goes on from a checkpoint with a copy of its decisions.

    Args:
        tuner: Options of the tuning.
        run: The run, with the configuration that it was given.
        path: Decisions file of the run, which the copy replaces.
        folder: Folder of the checkpoint; see `Tuning.save`.

    Raises:
        CheckpointError: The checkpoint has no decisions.
        ConfigError: The decisions are damaged, or of another run.
    """
    saved = folder / DECISIONS
    if not saved.is_file():
        raise CheckpointError(
            f"{folder} has no {DECISIONS}, so the run that saved it was not tuned: go on without "
            "auto, or start a tuned run anew"
        )
    check_same_run(saved, run.settings)
    run = replace(run, config=read_header(saved).knobs.applied_to(run.config))
    num_lines = len(saved.read_text(encoding="utf-8").splitlines())
    shutil.copyfile(saved, path)
    return Tuning.begin(tuner, run, path, num_lines)


def replayed(path: Path, total_steps: int) -> Tuning:
    """Return the tuning that takes the decisions of the run to be repeated.

    Args:
        path: Decisions file of that run, which has finished.
        total_steps: Steps of the run that repeats it.

    Raises:
        ConfigError: The file can't be read, or settings and data no longer make a run of its
            length.
    """
    found = read_decisions(path)
    assert found.end is not None
    if found.end.step != total_steps:
        raise ConfigError(
            f"{path} can't be replayed: the run took {found.end.step} steps, and its settings now "
            f"mean {total_steps}: the data has changed since; restore it"
        )
    controller = LoggedDecisions(found.changes, largest_interval=found.header.largest_interval)
    return Tuning(controller=controller, log=None, start=found.header.knobs)


def check_same_run(path: Path, settings: Mapping[str, Any]) -> None:
    """Refuse a decisions file of a run whose weights had other settings.

    Args:
        path: The file.
        settings: Settings of the run that repeats it, or that goes on from it.

    Raises:
        ConfigError: Some are others; the message says which.
    """
    before = read_header(path).settings
    others = [
        f"{name} was {before.get(name)!r}, now {settings.get(name)!r}"
        for name in sorted({*before, *settings} - {COMMAND})
        if before.get(name) != settings.get(name)
    ]
    if others:
        raise ConfigError(
            f"the decisions in {path} are of another run: {'; '.join(others)}: give what it had, "
            "or start a tuned run anew"
        )
