"""Positions: how many tokens a sequence may have. Learned ones end; rotary ones do not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zenflow.errors import ConfigError

_LEARNED = {
    "gpt2": "n_positions", "opt": "max_position_embeddings", "bert": "max_position_embeddings",
}  # fmt: skip
"""Field with the number of learned positions, by family; a token beyond them stops the forward."""


def check_sequence(name: str, config: Mapping[str, Any], sequence: int) -> list[str]:
    """Return notes on a sequence that is longer than what a model was made for.

    Args:
        name: Of the model, for the words.
        config: Content of its config.json.
        sequence: Tokens of a sequence.

    Raises:
        ConfigError: The model has learned positions, and fewer than that.
    """
    learned = _LEARNED.get(str(config.get("model_type")))
    most = config.get(learned or "max_position_embeddings")
    if not isinstance(most, int) or isinstance(most, bool) or sequence <= most:
        return []
    if learned is not None:
        raise ConfigError(
            f"{name} has {most:,} learned positions ({learned}), so a sequence of {sequence:,} "
            f"tokens would stop in its first forward: give --sequence {most} or less"
        )
    return [
        f"{name} was made for {most:,} positions (max_position_embeddings): with {sequence:,} it "
        "runs, but what it learns there is not known"
    ]
