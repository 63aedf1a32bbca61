"""One run: fine-tune under a strategy, then test every sentence once.

Batches hold sentences of like length, so there is little padding; they are pure functions of
(seed, index).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from evidence.studies.sst2.data import Sentence, Sentences
from evidence.studies.trained import quiet
from experiments.lab.intervals import packed
from experiments.lab.study import Row
from experiments.output.run_types import Evaluation
from experiments.training.parts.data.batches import Batch, TrainingData, encode, padded
from experiments.training.parts.data.tokens import TextTokenizer
from experiments.training.parts.setup import RunSetup, build_setup
from experiments.training.run.emulated_link import choose_link
from experiments.training.run.evaluation import cross_entropy, forward
from experiments.training.run.loop import Training
from experiments.training.run.stop import StopRequest
from experiments.training.run.tuned.tuning import tuning_of, with_start
from experiments.training.settings.training import TrainSettings

_KEPT = (
    "eval_loss", "final_train_loss", "captured_energy", "steps", "max_staleness", "config",
    "tuning", "emulated_link", "num_params", "device",
)  # fmt: skip
"""Fields of a run's summary that a record takes. Seconds are not among them: runs share the
machine."""

POOL_BATCHES = 16
"""Batches whose sentences are sorted by length together. A pool is drawn at random anew in each
epoch, so a sentence's company changes; sorting the whole epoch would fix it."""
_TEST_BATCH = 64


class _Rows:
    """Labelled sentences as tokens."""

    def __init__(self, rows: Sequence[Sentence], tokenizer: TextTokenizer, sequence: int) -> None:
        """Tokenize the rows once, cut at ``sequence`` tokens."""
        self._rows = encode(rows, tokenizer, sequence)
        self._pad = tokenizer.pad_id

    def _by_length(self, items: Iterable[int]) -> list[int]:
        """Return the numbers of rows, shortest first."""
        return sorted(items, key=lambda item: len(self._rows[item][0]))

    def _padded(self, items: Sequence[int]) -> Batch:
        """Return rows as a batch, filled up to the longest."""
        return padded([self._rows[item] for item in items], self._pad)


class PooledBatches(_Rows):
    """Training batches: shuffled, sorted by length within pools, batches shuffled again."""

    def __init__(
        self,
        rows: Sequence[Sentence],
        tokenizer: TextTokenizer,
        *,
        batch_size: int,
        sequence: int,
        seed: int,
    ) -> None:
        """Tokenize the rows once, cut at ``sequence`` tokens."""
        super().__init__(rows, tokenizer, sequence)
        self._batch_size = batch_size
        self._seed = seed
        self._epoch = -1
        self._plan: list[list[int]] = []

    @property
    def per_epoch(self) -> int:
        """Batches of an epoch; the last one drawn may be smaller than the others."""
        return -(-len(self._rows) // self._batch_size)

    def batch(self, index: int) -> Batch:
        """Return batch ``index``: inputs (B, longest), targets (B,), mask (B, longest)."""
        return self._padded(self.items(index))

    def items(self, index: int) -> list[int]:
        """Return the numbers of the rows in batch ``index``; every epoch holds each row once."""
        epoch, place = divmod(index, self.per_epoch)
        if epoch != self._epoch:
            self._plan = self._planned(epoch)
            self._epoch = epoch
        return self._plan[place]

    def _planned(self, epoch: int) -> list[list[int]]:
        # Two odd multipliers keep (seed, epoch) pairs apart within torch's 64-bit seed.
        mixed = (self._seed * 0x9E3779B97F4A7C15 + epoch * 0xBF58476D1CE4E5B9) % 2**63
        generator = torch.Generator().manual_seed(mixed)
        order = torch.randperm(len(self._rows), generator=generator).tolist()
        size, pool = self._batch_size, self._batch_size * POOL_BATCHES
        batches = []
        for start in range(0, len(order), pool):
            drawn = self._by_length(order[start : start + pool])
            batches += [drawn[first : first + size] for first in range(0, len(drawn), size)]
        shuffled = torch.randperm(len(batches), generator=generator).tolist()
        return [batches[place] for place in shuffled]


class TestBatches(_Rows):
    """Every test sentence exactly once, shortest first."""

    __test__ = False  # not pytest's

    def __init__(
        self, rows: Sequence[Sentence], tokenizer: TextTokenizer, *, sequence: int
    ) -> None:
        """Tokenize the rows once, cut at ``sequence`` tokens."""
        super().__init__(rows, tokenizer, sequence)
        order = self._by_length(range(len(rows)))
        starts = range(0, len(order), _TEST_BATCH)
        self._plan = [order[start : start + _TEST_BATCH] for start in starts]

    @property
    def per_epoch(self) -> int:
        """Batches of the whole test."""
        return len(self._plan)

    def batch(self, index: int) -> Batch:
        """Return batch ``index``."""
        return self._padded(self._plan[index])

    def __iter__(self) -> Iterator[tuple[list[int], Batch]]:
        """Yield every batch with the numbers of its sentences."""
        for items in self._plan:
            yield items, self._padded(items)


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
        tuning = tuning_of(bench, folder)
        if tuning is not None:
            stack.callback(tuning.close)
        training = Finetuning(bench, folder, quiet(), None, tuning)
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
