"""Starts from new weights: a state without steps, and weights that a user loads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from zenflow.columns.layout import SplitParam
from zenflow.columns.placement import fill_masters, share_evenly
from zenflow.surface.state.parameter import LANDING, TRAINING, param_state

if TYPE_CHECKING:
    from zenflow.step.engine import Engine

_OF_WEIGHTS = ("master", "device_master", TRAINING)
_OF_LAYOUT = ("deferred_columns", "important_columns")
_KEPT = (*_OF_WEIGHTS, *_OF_LAYOUT, LANDING)


@torch.no_grad()
def restart(engine: Engine) -> None:
    """Reset a drained engine to no step: moments and windows empty, masters equal to the weights.

    All other values that are no tensors are the caller's to reset.
    """
    end_windows(engine)
    for split in engine.layout.splits:
        share_evenly(split)
    for place in engine.layout.places:
        kept: tuple[str, ...] = _KEPT
        if isinstance(place, SplitParam):
            if engine.may_write_states:
                place.host.begin_anew()
            kept = (*kept, *place.host.tensors())
        for name, tensor in param_state(engine, place).items():
            if name not in kept:
                tensor.zero_()
    take_weights(engine)


def end_windows(engine: Engine) -> None:
    """Begin all windows of a drained engine anew, with nothing in flight."""
    for window in engine.windows:
        window.count, window.wants_selection = 0, False
    engine.schedule.tasks.begin_anew()
    engine.in_flight.clear()
    engine.uploads.reset()


@torch.no_grad()
def take_weights(engine: Engine) -> None:
    """Take the present weights for the true ones; the engine is drained, with none in flight.

    A drive's checkpoint that nobody has loaded stays as it is, and no training may follow.
    """
    for split in engine.layout.splits if engine.may_write_states else ():
        fill_masters(split)
    for resident in engine.layout.residents:
        if resident.has_master:
            resident.master.copy_(resident.data)
