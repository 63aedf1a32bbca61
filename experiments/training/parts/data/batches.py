"""Batches: pure functions of (seed, index), so a run's place in its data is one number.

Micro-batch n is the same whether the run came to it directly, over a resume, or under another
strategy; nothing is drawn from a global random state.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from experiments.training.parts.data.hub import hub_dataset, is_saved_dataset
from experiments.training.parts.data.texts import (
    Documents,
    LabelledTexts,
    evaluated_on,
    has_labels,
    path_documents,
    stdlib_documents,
    tsv_texts,
)
from experiments.training.parts.data.tokens import TextTokenizer
from experiments.training.parts.ranks.ranks import ALONE, Ranks
from experiments.training.settings.paths import check_named
from experiments.training.settings.training import TrainSettings
from zenflow.errors import ConfigError

IGNORED = -100
"""Target that counts for nothing in the loss (torch's ``cross_entropy`` default)."""
_EVALUATION_SEED = 20_000_519
"""Evaluation sees the same windows in every run, whatever the run's own seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One micro-batch, or a rank's share of it; B sequences of length L."""

    inputs: Tensor
    """Token ids, shape (B, L), int64."""
    targets: Tensor
    """Next tokens (B, L), or classes (B,); ``IGNORED`` where nothing is to be learnt."""
    mask: Tensor | None = None
    """1 at real tokens and 0 at padding, shape (B, L); None where there is no padding."""

    @property
    def num_tokens(self) -> int:
        """Real tokens, padding not counted."""
        return self.inputs.numel() if self.mask is None else int(self.mask.sum())

    def to(self, device: torch.device) -> Batch:
        """Return the batch on ``device``."""
        return Batch(
            inputs=self.inputs.to(device, non_blocking=True),
            targets=self.targets.to(device, non_blocking=True),
            mask=None if self.mask is None else self.mask.to(device, non_blocking=True),
        )


class Batches(Protocol):
    """An endless, shuffled sequence of micro-batches."""

    @property
    def per_epoch(self) -> int:
        """Micro-batches in an epoch, rounded up."""

    def batch(self, index: int) -> Batch:
        """Return micro-batch ``index`` (0, 1, ...): a pure function of it and the seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingData:
    """Data of a run: batches to train and to evaluate on."""

    name: str
    task: str
    """Kind of the task: ``lm`` or ``classification``."""
    num_classes: int
    """Classes of a classification; 0 for a language model."""
    train: Batches
    held_out: Batches
    notes: tuple[str, ...] = ()
    """Notes for the user on reading and splitting the texts, a line each."""


def read_source(settings: TrainSettings) -> Documents | LabelledTexts:
    """Return the texts that the settings name.

    Raises:
        ConfigError: There is nothing usable under that name; the message says what would be.
    """
    path = None if settings.data is None else Path(settings.data).expanduser()
    evaluation = None if settings.eval_data is None else Path(settings.eval_data).expanduser()
    if path is not None and path.exists() and not is_saved_dataset(path):
        if has_labels(path, settings.task):
            return tsv_texts(path, evaluation)
        return path_documents(path, evaluation)
    check_named(settings.data, "--data")
    source = _named_source(settings)
    return source if evaluation is None else evaluated_on(source, evaluation)


def _named_source(settings: TrainSettings) -> Documents | LabelledTexts:
    """Return this Python's source, or a Hugging Face data set."""
    if settings.data is not None:
        return hub_dataset(
            settings.data,
            task=settings.task,
            text_column=settings.text_column,
            label_column=settings.label_column,
        )
    if settings.task == "classification":
        raise ConfigError(
            "the default data (this Python's source) has no labels: give --data a TSV of "
            "text and label for classification"
        )
    return _library()


@functools.cache
def _library() -> Documents:
    """Return this Python's source, read once for all runs of a comparison or a study."""
    return stdlib_documents()


def make_batches(
    source: Documents | LabelledTexts,
    tokenizer: TextTokenizer,
    settings: TrainSettings,
    ranks: Ranks = ALONE,
) -> TrainingData:
    """Return training and evaluation batches of a source, or one rank's share of each.

    Raises:
        ConfigError: There is less text than one batch needs, or ranks can't share a batch.
    """

    def batches(part: Any, seed: int) -> Batches:
        shape: dict[str, Any] = {
            "batch_size": settings.batch_size,
            "sequence": settings.sequence,
            "seed": seed,
            "ranks": ranks,
        }
        if isinstance(source, LabelledTexts):
            return LabelledBatches(part, tokenizer, **shape)
        return TokenWindows(tokenizer.stream(part), **shape)

    return TrainingData(
        name=source.name,
        task=source.task,
        num_classes=len(source.classes) if isinstance(source, LabelledTexts) else 0,
        train=batches(source.train, settings.seed),
        held_out=batches(source.held_out, _EVALUATION_SEED),
        notes=source.notes,
    )


class _ShuffledBatches:
    """Batches of items that are drawn without end: one seeded permutation after another."""

    def __init__(self, num_items: int, batch_size: int, seed: int, ranks: Ranks) -> None:
        if batch_size % ranks.count:
            raise ConfigError(
                f"{ranks.count} ranks share each micro-batch evenly, but one has {batch_size} "
                f"sequences: use a --batch-size that {ranks.count} divides (it counts the "
                "sequences of all ranks), and no fewer texts"
            )
        self._num_items = num_items
        self._batch_size = batch_size
        self._seed = seed
        self._share = ranks.share(batch_size)
        self._epoch = -1
        self._order: list[int] = []

    @property
    def per_epoch(self) -> int:
        """Micro-batches in an epoch, rounded up."""
        return -(-self._num_items // self._batch_size)

    def _items(self, index: int) -> list[int]:
        """Return the numbers of this rank's items of micro-batch ``index``."""
        first = index * self._batch_size
        positions = range(first, first + self._batch_size)[self._share]
        return [self._item(position) for position in positions]

    def _item(self, position: int) -> int:
        epoch, place = divmod(position, self._num_items)
        if epoch != self._epoch:
            # Two odd multipliers keep (seed, epoch) pairs apart within torch's 64-bit seed.
            mixed = (self._seed * 0x9E3779B97F4A7C15 + epoch * 0xBF58476D1CE4E5B9) % 2**63
            generator = torch.Generator().manual_seed(mixed)
            self._order = torch.randperm(self._num_items, generator=generator).tolist()
            self._epoch = epoch
        return self._order[place]


class TokenWindows(_ShuffledBatches):
    """Windows of ``sequence`` tokens and their successors, cut side by side from one stream."""

    def __init__(
        self, tokens: Tensor, *, batch_size: int, sequence: int, seed: int, ranks: Ranks = ALONE
    ) -> None:
        """Take the stream (1-D, int32); raises ``ConfigError`` where it is too short."""
        num_windows = (len(tokens) - 1) // sequence
        if num_windows < 1:
            raise ConfigError(
                f"a sequence of {sequence} tokens needs at least {sequence + 1} tokens in each "
                f"part of the data, but one has {len(tokens)}: lower --sequence, give more text, "
                "or texts to evaluate on with --eval-data"
            )
        super().__init__(num_windows, batch_size, seed, ranks)
        self._tokens = tokens
        self._sequence = sequence

    def batch(self, index: int) -> Batch:
        """Return micro-batch ``index``; inputs and targets are (B, sequence)."""
        starts = torch.tensor(self._items(index)).unsqueeze(1) * self._sequence
        positions = starts + torch.arange(self._sequence + 1)
        tokens = self._tokens[positions].long()
        return Batch(inputs=tokens[:, :-1].contiguous(), targets=tokens[:, 1:].contiguous())


class LabelledBatches(_ShuffledBatches):
    """Labelled texts, cut at ``sequence`` tokens and padded to the longest of the batch."""

    def __init__(
        self,
        rows: Sequence[tuple[str, int]],
        tokenizer: TextTokenizer,
        *,
        batch_size: int,
        sequence: int,
        seed: int,
        ranks: Ranks = ALONE,
    ) -> None:
        """Tokenize the rows once."""
        self._rows = [row for row in encode(rows, tokenizer, sequence) if row[0]]
        if not self._rows:
            raise ConfigError("every labelled text is empty: check --data")
        super().__init__(len(self._rows), min(batch_size, len(self._rows)), seed, ranks)
        self._pad = tokenizer.pad_id

    def batch(self, index: int) -> Batch:
        """Return micro-batch ``index``: inputs (B, longest), targets (B,), mask (B, longest)."""
        return padded([self._rows[item] for item in self._items(index)], self._pad)


def encode(
    rows: Sequence[tuple[str, int]], tokenizer: TextTokenizer, sequence: int
) -> list[tuple[list[int], int]]:
    """Return the rows' tokens, cut at ``sequence``, with their labels."""
    encoded = tokenizer.encode_many([text for text, _ in rows], max_tokens=sequence)
    return [(tokens, label) for tokens, (_, label) in zip(encoded, rows, strict=True)]


def padded(rows: Sequence[tuple[list[int], int]], pad: int) -> Batch:
    """Return rows of tokens and label as a batch, filled up to the longest."""
    longest = max(len(tokens) for tokens, _ in rows)
    inputs = torch.full((len(rows), longest), pad, dtype=torch.int64)
    mask = torch.zeros_like(inputs)
    for line, (tokens, _) in enumerate(rows):
        inputs[line, : len(tokens)] = torch.tensor(tokens)
        mask[line, : len(tokens)] = 1
    return Batch(inputs=inputs, targets=torch.tensor([label for _, label in rows]), mask=mask)
