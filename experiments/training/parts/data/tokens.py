"""Text to tokens: bytes for models made from scratch, the model's own tokenizer otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from zenflow.errors import ConfigError

SEPARATOR = 256
"""Token between two documents."""
PADDING = 257


class ByteTokenizer:
    """A token is a byte of UTF-8; two more ids separate documents and pad."""

    pad_id = PADDING

    def stream(self, texts: Sequence[str]) -> Tensor:
        """Return all texts as one 1-D int32 stream, a separator behind each."""
        encoded = [np.frombuffer(text.encode("utf-8"), dtype=np.uint8) for text in texts]
        return _joined(encoded, [SEPARATOR])

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; the two that are no bytes are shown by names."""
        names = {SEPARATOR: b"<|separator|>", PADDING: b"<|padding|>"}
        parts = (names.get(token) or bytes([token]) for token in tokens)
        return b"".join(parts).decode("utf-8", errors="replace")

    def encode_many(self, texts: Sequence[str], max_tokens: int) -> list[list[int]]:
        """Return each text's bytes, cut at ``max_tokens``."""
        return [list(text.encode("utf-8")[:max_tokens]) for text in texts]


class PretrainedTokenizer:
    """A transformers tokenizer in the shape that batches need."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        """Wrap ``tokenizer`` for a model whose embedding has ``vocab_size`` rows."""
        if len(tokenizer) > vocab_size:
            raise ConfigError(
                f"the tokenizer knows {len(tokenizer)} tokens but the model's embedding has "
                f"{vocab_size} rows: they belong to different models, check --model"
            )
        self._tokenizer = tokenizer
        ends = (tokenizer.eos_token_id, tokenizer.sep_token_id, tokenizer.bos_token_id)
        self._separator = next((token for token in ends if token is not None), None)
        pads = (tokenizer.pad_token_id, self._separator, 0)
        self.pad_id = next(token for token in pads if token is not None)

    def stream(self, texts: Sequence[str]) -> Tensor:
        """Return all texts as one 1-D int32 stream, a separator behind each."""
        encoded = self._tokenizer(list(texts), add_special_tokens=False, verbose=False)
        tail = [] if self._separator is None else [self._separator]
        return _joined(encoded["input_ids"], tail)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special tokens included."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text

    def encode_many(self, texts: Sequence[str], max_tokens: int) -> list[list[int]]:
        """Return each text's token ids with the model's special tokens, cut at ``max_tokens``.

        Where every text has a tab, each is a pair of texts, which the model's tokens separate.
        """
        parts = [text.split("\t", 1) for text in texts]
        seconds = [part[1] for part in parts if len(part) == 2]
        if len(seconds) < len(parts):
            encoded = self._tokenizer(list(texts), truncation=True, max_length=max_tokens)
        else:
            firsts = [part[0] for part in parts]
            encoded = self._tokenizer(firsts, seconds, truncation=True, max_length=max_tokens)
        return [list(ids) for ids in encoded["input_ids"]]

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files next to a model's."""
        self._tokenizer.save_pretrained(str(folder))


TextTokenizer: TypeAlias = ByteTokenizer | PretrainedTokenizer


def _joined(texts: Sequence[Any], separator: list[int]) -> Tensor:
    """Return texts' token ids in one int32 stream, the separator behind each."""
    parts = [np.asarray(part, dtype=np.int32) for text in texts for part in (text, separator)]
    return torch.from_numpy(np.concatenate(parts)) if parts else torch.empty(0).int()
