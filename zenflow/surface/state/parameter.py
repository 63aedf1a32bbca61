"""Tensors of one parameter's state.

A split parameter's entry has the host's rows under torch's names, or the parts of their compact
format, and the device's rows with the prefix `device_`. It also has the low-precision weights that
training sees and those about to land. With these a resumed run is exact whatever weights the model
was loaded with. Every entry has the same names and shapes at every step, so that
`torch.distributed.checkpoint` can load in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zenflow.columns.device_rows import Resident
from zenflow.columns.host_rows import ROW_STATE
from zenflow.columns.layout import SplitParam
from zenflow.columns.shards import RowSpread, is_of_another_rank, part_of, spread
from zenflow.host_state import num_groups

if TYPE_CHECKING:
    from zenflow.step.engine import Engine

WHOLE = ("scores", "mean_squares", "row_mean_squares", "window_sketch")
"""Names of tensors that do not depend on which columns are important."""
TRAINING = "training_weight"
"""Name of deferred columns' weights as training sees them, (D, O) in the parameter's dtype."""
LANDING = "landing_weight"
"""Name of the weights of updates in flight, (D, O) in the parameter's dtype: zeros elsewhere."""
_BY_GROUP = ("exp_avg_exponent", "exp_avg_sq_exponent")
"""Names of tensors with a number for each group of rows in place of a row."""
_REPLICATED = {
    *("step", "device_step", "deferred_columns", "important_columns"),
    *("scores", "mean_squares", "window_sketch"),
}
"""Names of tensors that every rank has whole where rows are spread over ranks."""
_SECOND = ("exp_avg_sq", "exp_avg_sq_exponent", "device_exp_avg_sq")
"""Names of second moments, whose tensors are empty where these are factored."""


def _row_dim(place: SplitParam | Resident, name: str) -> int | None:
    """Return the dimension of a tensor that is the parameter's rows; None if none is."""
    is_empty = isinstance(place, SplitParam) and not place.bank.has_second and name in _SECOND
    if name in _REPLICATED or is_empty:
        return None
    return 0 if isinstance(place, Resident) or name == "row_mean_squares" else 1


def _spread_of(place: SplitParam | Resident, name: str) -> RowSpread | None:
    """Return the spread of a tensor's rows over ranks: the device's or the hosts'."""
    is_device = name.startswith("device_") or name == "row_mean_squares"
    if isinstance(place, Resident) or is_device:
        return RowSpread.of(place.param)
    rows = place.part.spread
    if rows is not None and name in _BY_GROUP:
        return replace(rows, num_rows=num_groups(rows.num_rows))
    return rows


def shown_state(place: SplitParam | Resident, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a parameter's tensors for a state: DTensors where ranks have some rows each.

    So `torch.distributed.checkpoint` can save on some ranks and load on others.
    """
    shown = {}
    for name, tensor in tensors.items():
        dim = _row_dim(place, name)
        shown[name] = tensor if dim is None else spread(tensor, _spread_of(place, name), dim)
    return shown


def taken_part(place: SplitParam | Resident, name: str, saved: Tensor) -> Tensor:
    """Return this rank's part of a tensor of a state."""
    dim = _row_dim(place, name)
    return saved if dim is None else part_of(saved, _spread_of(place, name), dim)


def has_rows_of_another_rank(place: SplitParam | Resident, name: str, saved: Tensor) -> bool:
    """Whether a tensor of a state is another rank's own part."""
    return _row_dim(place, name) is not None and is_of_another_rank(saved, _spread_of(place, name))


def param_state(engine: Engine, place: SplitParam | Resident) -> dict[str, Tensor]:
    """Return the live tensors of one parameter's state on this rank.

    `LANDING` alone is not live: updates in flight are in memory that all parameters share. Its
    tensor has the right shape and dtype, takes no memory and can't be written to;
    `landing_weight` returns the values to save.
    """
    if isinstance(place, Resident):
        return place.state()
    bank_rows = slice(place.bank_first, place.bank_last)
    state = place.host.tensors()
    state |= {f"device_{name}": getattr(place.bank, name)[bank_rows] for name in ROW_STATE}
    state |= engine.schedule.tasks.param_state(place)
    if engine.probes.sketch is not None:
        state["window_sketch"] = engine.probes.sketch.sums_of(place)
    if engine.fresh is not None:
        state["row_mean_squares"] = place.rows.mean_squares
    return state | {
        TRAINING: engine.training.of(place),
        LANDING: torch.zeros((), dtype=place.param.dtype, device="cpu").expand(place.host.shape),
        "deferred_columns": place.deferred_columns,
        "important_columns": place.important_columns,
        "scores": place.columns.scores,
        "mean_squares": place.columns.mean_squares,
    }


def landing_weight(engine: Engine, place: SplitParam) -> Tensor:
    """Return a copy of a drained parameter's updates in flight, in the rows of their blocks."""
    values = torch.zeros(place.host.shape, dtype=place.param.dtype, device="cpu")
    row = 0
    for block in place.blocks:
        count = block.shape.num_deferred
        if (update := engine.in_flight.of(block)) is not None:
            values[row : row + count] = update.values
        row += count
    return values
