"""Controllers by name, and configurations that leave them nothing to choose. Quick to import."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from zenflow.config import ZenFlowConfig

Controllers = Literal["twin", "zen-auto", "both"]
"""The simulator's twin of the run, zen-auto (S alone), or the twin with zen-auto's S."""


def untunable(controller: str, config: ZenFlowConfig) -> Iterator[str]:
    """Yield the reasons why a configuration leaves a controller nothing to choose."""
    has_twin, k = controller != "zen-auto", config.topk_ratio
    if k == 1 or (k == 0 and has_twin):
        yield (
            f"controller {controller!r} has nothing to choose with a topk_ratio of {k:g}, by "
            f"which all columns are on the {'device' if k else 'host'} for good: leave one of the "
            "two out"
        )
    if has_twin and not config.is_exact:
        yield (
            f"controller {controller!r} knows what late updates cost under the exact rule alone: "
            "use strategy 'zenflow' with it, or controller 'zen-auto'"
        )
