"""Sizes of decoder that ``--model`` knows by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NUM_BYTE_TOKENS = 258
"""Bytes, a separator, padding: the vocabulary of models made from scratch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """The shape of a Llama-style decoder."""

    hidden: int
    """Width of the residual stream."""
    layers: int
    heads: int
    ffn: int
    """Width of the gated feed-forward layer."""
    tied: bool = True
    """Whether the output layer shares the embedding's storage."""

    def config(self, vocab_size: int = NUM_BYTE_TOKENS) -> dict[str, Any]:
        """Return the sizes of a model under transformers' names, over the byte vocabulary."""
        return {
            "model_type": "llama",
            "vocab_size": vocab_size,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "intermediate_size": self.ffn,
            "tie_word_embeddings": self.tied,
        }


MODEL_SIZES: Mapping[str, ModelSize] = {
    "tiny": ModelSize(hidden=64, layers=2, heads=4, ffn=176),
    "mini": ModelSize(hidden=128, layers=4, heads=4, ffn=352),
    "small": ModelSize(hidden=192, layers=4, heads=6, ffn=512),
    "base": ModelSize(hidden=256, layers=6, heads=8, ffn=704),
    "10m": ModelSize(hidden=384, layers=6, heads=6, ffn=1024),
    "medium": ModelSize(hidden=512, layers=8, heads=8, ffn=1408),
    "large": ModelSize(hidden=768, layers=12, heads=12, ffn=2048, tied=False),
    "1b": ModelSize(hidden=2048, layers=20, heads=16, ffn=5632, tied=False),
}
"""Sizes with the byte vocabulary: 0.1M, 0.8M, 1.8M, 4.9M, 10.7M, 26M, 85M and 1.0B parameters."""
