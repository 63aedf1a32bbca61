"""The tensors of one parameter's state.

A split parameter's entry has the host's rows under torch's names, the device's rows with the
prefix `device_`, and the low-precision weights that training sees and that are about to land: with
them a resumed run is exact whatever weights the model was loaded with. Every entry has the same
names and shapes at every step, so that `torch.distributed.checkpoint` can load in place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zenflow.columns.device_rows import Resident
from zenflow.columns.host_rows import ROW_STATE
from zenflow.columns.layout import SplitParam

if TYPE_CHECKING:
    from zenflow.step.engine import Engine

WHOLE = ("scores", "mean_squares", "row_mean_squares", "window_sketch")
"""Names of tensors that have nothing to do with which columns are important."""
LANDING = "landing_weight"
"""Name of the weights of updates in flight, (D, O) in the parameter's dtype: zeros elsewhere."""


def param_state(engine: Engine, place: SplitParam | Resident) -> dict[str, Tensor]:
    """Return the live tensors of one parameter's state, those of its host's tasks included.

    `LANDING` alone is not live: updates in flight are in memory that all parameters share. It is
    of the right shape and kind, takes no memory and can't be written to; `landing_weight` is what
    is saved.
    """
    if isinstance(place, Resident):
        return place.state()
    bank_rows = slice(place.bank_first, place.bank_last)
    state = {name: getattr(place.host, name) for name in ROW_STATE}
    state |= {f"device_{name}": getattr(place.bank, name)[bank_rows] for name in ROW_STATE}
    state |= engine.schedule.tasks.param_state(place)
    if engine.probes.sketch is not None:
        state["window_sketch"] = engine.probes.sketch.sums_of(place)
    return state | {
        "training_weight": place.host.staging,
        LANDING: torch.zeros((), dtype=place.param.dtype).expand(place.host.staging.shape),
        "deferred_columns": place.deferred_columns,
        "important_columns": place.important_columns,
        "scores": place.columns.scores,
        "mean_squares": place.columns.mean_squares,
        "row_mean_squares": place.rows.mean_squares,
    }


def landing_weight(place: SplitParam) -> Tensor:
    """Return a copy of a drained parameter's updates in flight, in the rows of their blocks."""
    values = torch.zeros(place.host.staging.shape, dtype=place.param.dtype)
    row = 0
    for block in place.blocks:
        count = block.shape.num_deferred
        if block.landing is not None:
            values[row : row + count] = block.landing.values
        row += count
    return values
