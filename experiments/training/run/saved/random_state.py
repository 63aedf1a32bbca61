"""Random generators of a run, as a checkpoint has them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import torch

Generators: TypeAlias = tuple[torch.Tensor, Any, Any, list[torch.Tensor]]
"""States of torch's, Python's, numpy's and the GPUs' global generators, as those give them."""


def generators() -> Generators:
    """Return the state of every global generator a model or data set may draw from."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return torch.get_rng_state(), random.getstate(), np.random.get_state(), cuda


def random_state(found: Generators) -> dict[str, Any]:
    """Return generators' states as a checkpoint takes them."""
    host, (version, internal, gauss), (kind, keys, position, has_gauss, cached), cuda = found
    return {
        "torch": host,
        "python": [version, list(internal), gauss],
        "numpy": [kind, [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
        "cuda": cuda,
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Take up what ``random_state`` returned."""
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    # A checkpoint of a machine with other GPUs: torch's own generator above is what matters.
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
