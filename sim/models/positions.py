"""Positions: how many tokens a sequence may have. Learned ones end; rotary ones do not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sim.models.families import read_model
from zenflow.errors import ConfigError


def check_sequence(name: str, config: Mapping[str, Any], sequence: int) -> list[str]:
    """Return notes on a sequence that is longer than what a model was made for.

    Args:
        name: Of the model, for the words.
        config: Content of its config.json.
        sequence: Tokens of a sequence.

    Raises:
        ConfigError: The model has learned positions, and fewer than that, or is not known.
    """
    model = read_model(config)
    learned, most = model.learned, model.positions
    if most is None or sequence <= most:
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
