"""One run: fine-tune under a strategy, then test every sentence once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from experiments.lab.intervals import packed
from experiments.output.files import write_json
from experiments.output.progress import Reporter
from experiments.output.run_types import Evaluation
from experiments.studies.sst2.batches import PooledBatches, TestBatches
from experiments.studies.sst2.data import Sentences
from experiments.training.data.batches import TrainingData
from experiments.training.data.tokens import TextTokenizer
from experiments.training.emulated_link import choose_link
from experiments.training.evaluation import cross_entropy, forward
from experiments.training.loop import Training
from experiments.training.settings import TrainSettings
from experiments.training.setup import RunSetup, build_setup
from experiments.training.stop import StopRequest
from experiments.training.tuned.run import Tuning, with_start
from zenflow.errors import ConfigError

RESULT = "run.json"

_KEPT = (
    "eval_loss", "final_train_loss", "captured_energy", "steps", "max_staleness", "config",
    "tuning", "emulated_link", "num_params", "device",
)  # fmt: skip
"""What a record takes of a run's summary. Seconds are not among it: runs share the machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One run to be made."""

    variant: str
    settings: TrainSettings
    sentences: Sentences
    folder: Path
    identity: Mapping[str, Any]
    """What must be the same for a finished run to count as this one; plain JSON values."""


class Finetuning(Training):
    """The training loop, with a test by sentence; it ends without a model or a checkpoint.

    A run lasts minutes: one that was stopped is made again from its start.
    """

    def evaluate(self) -> Evaluation:
        """Return loss, accuracy, and which sentences were told rightly, with the true weights."""
        batches = self.setup.data.held_out
        assert isinstance(batches, TestBatches)
        marks: dict[int, int] = {}
        losses = 0.0
        with self.true_weights(), torch.no_grad():
            for items, host_batch in batches:
                batch = host_batch.to(self.setup.device)
                logits = forward(self.setup.model, batch)
                losses += cross_entropy(logits, batch).item() * len(items)
                right = (logits.argmax(-1) == batch.targets).long().tolist()
                marks.update(zip(items, right, strict=True))
        ordered = [marks[item] for item in range(len(marks))]
        accuracy = sum(ordered) / len(ordered)
        return {
            "eval_loss": losses / len(ordered),
            "eval_accuracy": accuracy,
            "correct": packed(ordered),
        }

    def export(self) -> None:
        """Write no model: what is asked of it has been answered."""

    def save(self, *, keep_others: bool = False) -> None:
        """Write no checkpoint."""


def result_of(task: Task) -> dict[str, Any] | None:
    """Return a finished run's row, or None where there is none.

    Raises:
        ConfigError: The folder holds another run.
    """
    path = task.folder / RESULT
    if not path.is_file():
        return None
    row: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    changed = [
        f"{name} was {row['identity'].get(name)!r}, now {value!r}"
        for name, value in task.identity.items()
        if row["identity"].get(name) != value
    ]
    if changed:
        raise ConfigError(
            f"{path} is of another study ({'; '.join(changed[:4])}): give another --runs, or the "
            "former settings"
        )
    return row


def carry_out(task: Task) -> dict[str, Any]:
    """Make a run and return its row, which its folder keeps.

    Raises:
        ConfigError: The model can't be loaded or tuned.
        KeyboardInterrupt: A signal ended the run early; nothing is left of it.
    """
    quiet = Reporter(Console(quiet=True))
    with ExitStack() as stack:
        stop = stack.enter_context(StopRequest())
        bench = with_start(workbench(task.settings, task.sentences), None)
        task.folder.mkdir(parents=True, exist_ok=True)
        tuning = Tuning.of(bench, task.folder)
        if tuning is not None:
            stack.callback(tuning.close)
        training = Finetuning(bench, task.folder, quiet, None, tuning)
        stack.callback(training.close)
        outcome = training.run(stop)
    if outcome.stopped:
        raise KeyboardInterrupt
    return _write_result(task, outcome.summary)


def _write_result(task: Task, summary: Mapping[str, Any]) -> dict[str, Any]:
    row = {
        "variant": task.variant,
        "seed": task.settings.seed,
        "accuracy": summary["eval_accuracy"],
        "correct": summary["correct"],
        **{name: summary[name] for name in _KEPT},
        "identity": dict(task.identity),
        "commit": summary["commit"],
    }
    write_json(task.folder / RESULT, row)
    written: dict[str, Any] = json.loads((task.folder / RESULT).read_text(encoding="utf-8"))
    return written


def workbench(settings: TrainSettings, sentences: Sentences) -> RunSetup:
    """Return a run's model and batches."""

    def make_data(tokenizer: TextTokenizer) -> TrainingData:
        return TrainingData(
            name=sentences.name,
            task="classification",
            num_classes=2,
            train=PooledBatches(
                sentences.train,
                tokenizer,
                batch_size=settings.batch_size,
                sequence=settings.sequence,
                seed=settings.seed,
            ),
            held_out=TestBatches(sentences.test, tokenizer, sequence=settings.sequence),
        )

    return build_setup(settings, make_data)


def emulated_link(settings: TrainSettings, sentences: Sentences) -> float | None:
    """Return the bytes/s of the link that tuned runs are given; None on a GPU, which has one."""
    bench = workbench(replace(settings, controller=None), sentences)
    return None if bench.device.type == "cuda" else choose_link(bench).bytes_per_second
