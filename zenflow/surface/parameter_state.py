"""The live tensors of one parameter's state.

A split parameter's entry has the host's rows under torch's names, the device's rows with the
prefix `device_`, and the low-precision weights that training sees: with them a resumed run is
exact whatever weights the model was loaded with.
"""

from __future__ import annotations

from torch import Tensor

from zenflow.columns.device_rows import Resident
from zenflow.columns.host_rows import ROW_STATE
from zenflow.columns.layout import SplitParam
from zenflow.step.host_tasks import AbstractHostTasks


def param_state(place: SplitParam | Resident, tasks: AbstractHostTasks) -> dict[str, Tensor]:
    """Return the live tensors of one parameter's state, those of its host's tasks included."""
    if isinstance(place, Resident):
        return place.state()
    bank_rows = slice(place.bank_first, place.bank_last)
    state = {name: getattr(place.host, name) for name in ROW_STATE}
    state |= {f"device_{name}": getattr(place.bank, name)[bank_rows] for name in ROW_STATE}
    return (
        state
        | tasks.param_state(place)
        | {
            "training_weight": place.host.staging,
            "deferred_columns": place.deferred_columns,
            "important_columns": place.important_columns,
            "scores": place.columns.scores,
            "mean_squares": place.columns.mean_squares,
            "row_mean_squares": place.rows.mean_squares,
        }
    )
