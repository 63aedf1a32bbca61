"""A run from its settings to its files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from experiments.output.files import write_json
from experiments.output.progress import Reporter
from experiments.training.parts.data.shown import told_of_data
from experiments.training.parts.files.checkpoint import (
    CHECKPOINTS,
    Checkpoint,
    latest_checkpoint,
    load_checkpoint,
)
from experiments.training.parts.files.results import remove_results
from experiments.training.parts.files.step_log import read_steps
from experiments.training.parts.first_checks import check_new_states
from experiments.training.parts.ranks.ranks import ALONE, Ranks
from experiments.training.parts.setup import RunSetup, build_setup, describe
from experiments.training.run.loop import MODEL, Outcome, Training
from experiments.training.run.saved.resume import check_same_run, with_rise
from experiments.training.run.saved.space import check_space
from experiments.training.run.stop import StopRequest
from experiments.training.run.tuned.tuning import tuning_of, with_start
from experiments.training.settings.training import TrainSettings
from zenflow.errors import CheckpointError
from zenflow.provenance import provenance


def run(
    settings: TrainSettings,
    folder: Path,
    *,
    reporter: Reporter,
    stop: StopRequest,
    resume: bool = False,
    overwrite: bool = False,
    ranks: Ranks = ALONE,
) -> Outcome:
    """Train, and leave config.json, steps.jsonl, summary.json, trace, picture and checkpoint.

    Args:
        settings: What to do.
        folder: Where the files go; made if missing.
        reporter: Hears of every step.
        stop: Asked after every step whether to end early.
        resume: Go on from the checkpoint in ``folder``.
        overwrite: Remove an earlier run's results once nothing more is checked.
        ranks: Processes that share the run; all of them call this, and the first one writes.

    Raises:
        ConfigError: The settings can't be carried out.
        CheckpointError: A checkpoint can't be written, read, or is of another run.
    """
    checkpoint, rows = None, []
    if resume:  # damage is found before anything large is loaded
        _check_can_resume(settings, folder)
        checkpoint = load_checkpoint(folder / CHECKPOINTS, ranks)
        rows = read_steps(folder / "steps.jsonl")
    else:
        check_new_states(settings.state_dir)
    setup = build_setup(settings, ranks=ranks)
    if checkpoint is not None:
        check_same_run(setup, checkpoint)  # before any file of the run is touched
    space = check_space(setup, folder, has_one=checkpoint is not None)
    setup = with_start(setup, folder if resume else None)
    folder.mkdir(parents=True, exist_ok=True)
    if overwrite and ranks.is_first:
        remove_results(folder)
    with _training(setup, folder, reporter, checkpoint) as training:
        reporter.detail(describe(setup))
        reporter.once(told_of_data(setup.data, setup.tokenizer))
        if checkpoint is not None:
            reporter.detail(goes_on(checkpoint.step, setup.total_steps, rows))
        reporter.detail(str(training.memory()))
        reporter.detail(space)
        if ranks.is_first:
            write_json(folder / "config.json", _config_record(setup, training.changes))
        return training.run(stop)


def _check_can_resume(settings: TrainSettings, folder: Path) -> None:
    """Refuse to go on with a run that has saved nothing because it was told so."""
    if settings.checkpoint or latest_checkpoint(folder / CHECKPOINTS) is not None:
        return
    weights = folder / MODEL
    from_weights = f", or a new run from its weights with --model {weights}"
    raise CheckpointError(
        f"the run in {folder} was started with --no-checkpoint, and nothing of it can be resumed: "
        f"start it again with --overwrite{from_weights if weights.is_dir() else ''}"
    )


def goes_on(done: int, total: int, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return from which step a resumed run goes on, and what of its log is taken again."""
    again = sum(row["step"] > done for row in rows)
    text = f"goes on from step {done} of {total}"
    if again:
        steps = (
            "1 step of the log after it is"
            if again == 1
            else (f"{again} steps of the log after it are")
        )
        text += f"; {steps} taken again"
    return text


@contextmanager
def _training(
    setup: RunSetup, folder: Path, reporter: Reporter, checkpoint: Checkpoint | None
) -> Iterator[Training]:
    """Yield the loop's object and end the optimizer's threads behind it, whatever happened."""
    lines = None if checkpoint is None else checkpoint.state.get("decision_lines")
    with ExitStack() as stack:
        tuning = tuning_of(
            setup if checkpoint is None else with_rise(setup, checkpoint), folder, lines
        )
        if tuning is not None:
            stack.callback(tuning.close)
        training = Training(setup, folder, reporter, checkpoint, tuning)
        stack.callback(training.close)
        yield training


def _config_record(setup: RunSetup, made: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "settings": setup.settings.to_dict(),
        "config": setup.config.to_dict(),
        "total_steps": setup.total_steps,
        "steps_per_epoch": setup.steps_per_epoch,
        "task": setup.data.task,
        "data": setup.data.name,
        "data_fingerprint": setup.fingerprint,
        "changes": list(made),
        "device": str(setup.device),
        **provenance(),
    }
