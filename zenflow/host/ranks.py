"""Numbers of ranks: those that train together, and those on this machine."""

from __future__ import annotations

import os

from torch import distributed


def num_ranks() -> int:
    """Return the number of data-parallel ranks of this training."""
    is_used = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if is_used else 1


def ranks_on_this_machine() -> int:
    """Return the number of ranks that torchrun has started here; 1 without torchrun."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))) if num_ranks() > 1 else 1
