"""How many ranks train together, and how many of them share this machine."""

from __future__ import annotations

import os

from torch import distributed


def num_ranks() -> int:
    """Return the number of data-parallel ranks of this training."""
    is_used = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if is_used else 1


def ranks_on_this_machine() -> int:
    """Return how many ranks torchrun has started here; 1 where something else started this one."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))) if num_ranks() > 1 else 1
