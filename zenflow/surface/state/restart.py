"""Weights that are new to the optimizer: a state without steps, and weights that a user loads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from zenflow.columns.placement import fill_masters, share_evenly
from zenflow.lanes.completion import already_done
from zenflow.surface.state.parameter import LANDING, TRAINING, param_state

if TYPE_CHECKING:
    from zenflow.step.engine import Engine

_OF_WEIGHTS = ("master", "device_master", TRAINING)
_OF_LAYOUT = ("deferred_columns", "important_columns")
_KEPT = (*_OF_WEIGHTS, *_OF_LAYOUT, LANDING)


@torch.no_grad()
def restart(engine: Engine) -> None:
    """Let a drained engine's tensors be those of no step: moments of zero, masters of the weights.

    What is not a tensor, but for the blocks' windows, is the caller's.
    """
    end_windows(engine)
    for block in engine.layout.blocks:
        share_evenly(block)
    for place in engine.layout.places:
        for name, tensor in param_state(engine, place).items():
            if name not in _KEPT:
                tensor.zero_()
    take_weights(engine)


def end_windows(engine: Engine) -> None:
    """Let a drained engine's windows begin anew, with nothing in flight."""
    for block in engine.layout.blocks:
        block.count = block.accumulator = 0
        block.wants_selection = False
        block.landing = None
        block.staging_free = block.last_update = already_done()
    engine.uploads.reset()


@torch.no_grad()
def take_weights(engine: Engine) -> None:
    """Let the weights as they are be the true ones. The engine is drained, and nothing lands."""
    for split in engine.layout.splits:
        fill_masters(split)
    for resident in engine.layout.residents:
        if resident.has_master:
            resident.master.copy_(resident.data)
