"""A run from its settings to its files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from experiments.output.files import write_json
from experiments.output.progress import Reporter
from experiments.output.provenance import provenance
from experiments.training.data.shown import told_of_data
from experiments.training.log.step_log import read_steps
from experiments.training.loop import Outcome, Training
from experiments.training.preparation.setup import RunSetup, build_setup, describe
from experiments.training.ranks.ranks import ALONE, Ranks
from experiments.training.saved.checkpoint import CHECKPOINTS, Checkpoint, load_checkpoint
from experiments.training.saved.resume import check_same_run, with_rise
from experiments.training.saved.saving import warn_of_space
from experiments.training.settings.training import TrainSettings
from experiments.training.stop import StopRequest
from experiments.training.tuned.run import Tuning, with_start


def run(
    settings: TrainSettings,
    folder: Path,
    *,
    reporter: Reporter,
    stop: StopRequest,
    resume: bool = False,
    ranks: Ranks = ALONE,
) -> Outcome:
    """Train, and leave config.json, steps.jsonl, summary.json, trace, picture and checkpoint.

    Args:
        settings: What to do.
        folder: Where the files go; made if missing.
        reporter: Hears of every step.
        stop: Asked after every step whether to end early.
        resume: Go on from the checkpoint in ``folder``.
        ranks: Processes that share the run; all of them call this, and the first one writes.

    Raises:
        ConfigError: The settings can't be carried out.
        CheckpointError: A checkpoint can't be written, read, or is of another run.
    """
    checkpoint = None
    if resume:  # damage is found before anything large is loaded
        checkpoint = load_checkpoint(folder / CHECKPOINTS, ranks)
        read_steps(folder / "steps.jsonl")
    setup = build_setup(settings, ranks=ranks)
    if checkpoint is not None:
        check_same_run(setup, checkpoint)  # before any file of the run is touched
    setup = with_start(setup, folder if resume else None)
    folder.mkdir(parents=True, exist_ok=True)
    with _training(setup, folder, reporter, checkpoint) as training:
        reporter.detail(describe(setup))
        reporter.once(told_of_data(setup.data, setup.tokenizer))
        memory = training.memory()
        reporter.detail(str(memory))
        if ranks.is_first:
            write_json(folder / "config.json", _config_record(setup, training.changes))
            warn_of_space(training, memory)
        return training.run(stop)


@contextmanager
def _training(
    setup: RunSetup, folder: Path, reporter: Reporter, checkpoint: Checkpoint | None
) -> Iterator[Training]:
    """Yield the loop's object and end the optimizer's threads behind it, whatever happened."""
    lines = None if checkpoint is None else checkpoint.state.get("decision_lines")
    with ExitStack() as stack:
        tuning = Tuning.of(
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
