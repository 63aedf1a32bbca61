"""Tokens of texts that were made beforehand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from evidence.studies.language_model.model import in_transformers
from experiments.output.files import replacing
from experiments.training.parts.data.texts import path_documents
from experiments.training.parts.data.tokens import PretrainedTokenizer

_HELD_OUT_BATCHES = 8


def prepare(model: Path, texts: Path, target: Path) -> None:
    """Write the tokens of texts, for training and held out, as 16-bit integers.

    Raises:
        ConfigError: There is too little text, or the tokenizer knows more than 65,536 tokens.
    """
    from transformers.models.auto import AutoTokenizer

    where, file = in_transformers(model)
    tokenizer = AutoTokenizer.from_pretrained(where, local_files_only=True, **file)
    documents = path_documents(texts)
    encode = PretrainedTokenizer(tokenizer, 1 << 16).stream
    train, held_out = (
        encode(part).numpy().astype(np.uint16) for part in (documents.train, documents.held_out)
    )
    with replacing(target) as draft, open(draft, "wb") as file_:
        np.savez_compressed(file_, train=train, held_out=held_out)
    print(f"{target}: tokens of {documents.name}: {len(train):,} and {len(held_out):,} held out")


class Tokens:
    """Batches of the tokens that were made beforehand."""

    def __init__(self, path: Path | None, batch: int, sequence: int, seed: int) -> None:
        """Read the tokens; without a file they are random bytes."""
        if path is None:
            drawn = np.random.default_rng(0).integers(0, 256, 4000, dtype=np.uint16)
            streams = {"train": drawn[:3000], "held_out": drawn[3000:]}
        else:
            with np.load(path) as found:
                streams = {name: found[name] for name in ("train", "held_out")}
        self._streams = {
            name: torch.from_numpy(values.astype(np.int64)) for name, values in streams.items()
        }
        self._shape = batch, sequence + 1
        self._seed = seed

    def train(self, step: int) -> Tensor:
        """Return a step's batch, (B, L + 1): windows anywhere in the text, by seed and step."""
        draw = torch.Generator().manual_seed(1_000_003 * self._seed + step)
        stream, (batch, length) = self._streams["train"], self._shape
        firsts = torch.randint(0, len(stream) - length, (batch,), generator=draw)
        return torch.stack([stream[first : first + length] for first in firsts.tolist()])

    def held_out(self) -> Iterator[Tensor]:
        """Yield batches of the held-out text, one window after another."""
        stream, (batch, length) = self._streams["held_out"], self._shape
        count = min(_HELD_OUT_BATCHES, len(stream) // (batch * length))
        yield from stream[: count * batch * length].view(count, batch, length)
