"""One run: fine-tune under a strategy, then test every sentence once."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from experiments.lab.intervals import packed
from experiments.lab.study import Row
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

_KEPT = (
    "eval_loss", "final_train_loss", "captured_energy", "steps", "max_staleness", "config",
    "tuning", "emulated_link", "num_params", "device",
)  # fmt: skip
"""What a record takes of a run's summary. Seconds are not among it: runs share the machine."""


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


def fine_tune(settings: TrainSettings, sentences: Sentences, folder: Path) -> Row:
    """Make a run and return what it ended with.

    Raises:
        ConfigError: The model can't be loaded or tuned.
        KeyboardInterrupt: A signal ended the run early; nothing is left of it.
    """
    with ExitStack() as stack:
        stop = stack.enter_context(StopRequest())
        bench = with_start(workbench(settings, sentences), None)
        tuning = Tuning.of(bench, folder)
        if tuning is not None:
            stack.callback(tuning.close)
        training = Finetuning(bench, folder, Reporter(Console(quiet=True)), None, tuning)
        stack.callback(training.close)
        outcome = training.run(stop)
    if outcome.stopped:
        raise KeyboardInterrupt
    summary = outcome.summary
    return {
        "accuracy": summary["eval_accuracy"],
        "correct": summary["correct"],
        **{name: value for name, value in summary.items() if name in _KEPT},
        "commit": summary["commit"],
    }


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
