"""Batches of sentences of like length: pure functions of (seed, index), with little padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from experiments.studies.sst2.data import Row
from experiments.training.data.batches import Batch, encode, padded
from experiments.training.data.tokens import TextTokenizer

POOL_BATCHES = 16
"""Batches whose sentences are sorted by length together. A pool is drawn at random anew in each
epoch, so a sentence's company changes; sorting the whole epoch would fix it."""
_TEST_BATCH = 64


class PooledBatches:
    """Training batches: shuffled, sorted by length within pools, batches shuffled again."""

    def __init__(
        self,
        rows: Sequence[Row],
        tokenizer: TextTokenizer,
        *,
        batch_size: int,
        sequence: int,
        seed: int,
    ) -> None:
        """Tokenize the rows once, cut at ``sequence`` tokens."""
        self._rows = encode(rows, tokenizer, sequence)
        self._pad = tokenizer.pad_id
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
        return padded([self._rows[item] for item in self.items(index)], self._pad)

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
            drawn = sorted(order[start : start + pool], key=lambda item: len(self._rows[item][0]))
            batches += [drawn[first : first + size] for first in range(0, len(drawn), size)]
        shuffled = torch.randperm(len(batches), generator=generator).tolist()
        return [batches[place] for place in shuffled]


class TestBatches:
    """Every test sentence exactly once, shortest first."""

    __test__ = False  # not pytest's

    def __init__(self, rows: Sequence[Row], tokenizer: TextTokenizer, *, sequence: int) -> None:
        """Tokenize the rows once, cut at ``sequence`` tokens."""
        self._rows = encode(rows, tokenizer, sequence)
        self._pad = tokenizer.pad_id
        order = sorted(range(len(self._rows)), key=lambda item: len(self._rows[item][0]))
        starts = range(0, len(order), _TEST_BATCH)
        self._plan = [order[start : start + _TEST_BATCH] for start in starts]

    @property
    def per_epoch(self) -> int:
        """Batches of the whole test."""
        return len(self._plan)

    def batch(self, index: int) -> Batch:
        """Return batch ``index``."""
        return padded([self._rows[item] for item in self._plan[index]], self._pad)

    def __iter__(self) -> Iterator[tuple[list[int], Batch]]:
        """Yield every batch with the numbers of its sentences."""
        for index, items in enumerate(self._plan):
            yield items, self.batch(index)
