"""Saves in the middle of a run, and what its user is told when something ends it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from torch.optim import Optimizer

from experiments.output.progress import Reporter
from experiments.training.parts.files.checkpoint import CHECKPOINTS, checkpoints
from experiments.training.parts.ranks.launched import resume_line
from experiments.training.parts.setup import RunSetup
from experiments.training.run.saved.pace import SavePace
from zenflow.errors import CheckpointError, NormError


class SavedRun(Protocol):
    """A run in progress, as far as saving goes."""

    setup: RunSetup
    folder: Path
    reporter: Reporter
    step: int
    """Steps taken."""
    saved_step: int | None
    """Steps of the newest checkpoint; None if there is none."""

    @property
    def optimizer(self) -> Optimizer:
        """Optimizer of the run."""

    def save(self, *, keep_others: bool = False) -> None:
        """Write a checkpoint, if there is none of this step yet."""


def save_or_warn(run: SavedRun, pace: SavePace) -> None:
    """Save in the middle of a run, which a save that fails does not end."""
    started = time.monotonic()
    try:
        run.save()
        pace.saved(time.monotonic() - started)
    except CheckpointError as error:
        pace.failed()
        run.reporter.say(
            f"Warning: {error} The run goes on, and tries again in a minute at the latest."
        )


class Troubles:
    """Files that a run could not write at its end."""

    def __init__(self) -> None:
        """Start with nothing."""
        self._files: dict[str, list[str]] = {}

    def __bool__(self) -> bool:
        """Whether there is something."""
        return bool(self._files)

    def __str__(self) -> str:
        """List the reasons, each with the files that it has kept from being written."""
        return "\n".join(
            f"- {', '.join(files)}: {reason}" if files else f"- {reason}"
            for reason, files in self._files.items()
        )

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Go on behind an error of the disk, and take it down."""
        try:
            yield
        except CheckpointError as error:
            self._files.setdefault(str(error), [])
        except OSError as error:
            files = self._files.setdefault(error.strerror or str(error), [])
            if error.filename is not None and str(error.filename) not in files:
                files.append(str(error.filename))


@contextmanager
def saving_first(run: SavedRun) -> Iterator[None]:
    """Save what is sound before an error ends the run, and say how to go on.

    Earlier checkpoints stay: what led to the error may have begun before it.

    Raises:
        NormError: One ended the run; its message is for a user of the command.
    """
    try:
        yield
    except Exception as error:
        trouble = ""
        # Ranks save together. All have the same norms; another error may be of this one alone.
        is_of_all = isinstance(error, NormError) or not run.setup.ranks.are_several
        if is_of_all and run.setup.settings.checkpoint:
            try:
                run.optimizer.zero_grad()  # of the step under way
                run.save(keep_others=True)
            except Exception as other:  # noqa: BLE001  (the first error is the one to tell)
                is_same = isinstance(other, type(error))
                trouble = "" if is_same else f" (It can't be saved: {other})"
        if isinstance(error, NormError):
            raise NormError(_bad_norm_advice(error, run)) from error
        run.reporter.say(
            f"An error ended the run after step {run.step}. {how_to_go_on(run)}{trouble}"
        )
        raise


def how_to_go_on(run: SavedRun) -> str:
    """Return the line on the last save of a run that ends now, and the command to go on."""
    if run.saved_step is None and not run.setup.settings.checkpoint:
        return "Nothing of it can be resumed, as --no-checkpoint asked: start it again."
    if run.saved_step is None:
        return "There is no checkpoint of it: start it again, where there is room for one."
    if run.saved_step == run.step:
        saved = f"Everything up to step {run.step} is saved"
    else:
        saved = f"Its newest checkpoint is of step {run.saved_step}, and is whole"
    return f"{saved}: {resume_line(run.folder)}"


def _bad_norm_advice(error: NormError, run: SavedRun) -> str:
    """Return the advice for a user whose run a gradient norm has ended."""
    told = f"the gradient norm of step {error.step} is {error.norm}, and must be finite. "
    kept = checkpoints(run.folder / CHECKPOINTS)
    if not kept:
        return told + (
            "There is no checkpoint of the steps before: start again with a lower --lr, and with "
            "--checkpoint and --save-minutes or --save-every for checkpoints on the way"
        )
    if run.saved_step == run.step:
        told += f"The step was not taken, and everything up to step {run.step} is saved. "
    else:
        told += f"The newest checkpoint without it is {kept[0]}. "
    rate = run.setup.settings.lr / 10
    told += f"Go on with a lower learning rate: {resume_line(run.folder)} --lr {rate:g}"
    if len(kept) > 1:
        told += (
            f". If the loss had gone wrong before, go on from {kept[1].name}: remove {kept[0]} "
            "first"
        )
    else:
        told += ". If the loss had gone wrong before, start again with that rate"
    return told
