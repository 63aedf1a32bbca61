"""Formats of the host's state in a checkpoint: a run may go on with the other one."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zenflow.columns.layout import SplitParam
from zenflow.columns.placement import state_kind
from zenflow.config import ZenFlowConfig
from zenflow.drive.extents import RowState
from zenflow.step.host.exact import ExactTasks
from zenflow.surface.state.parameter import taken_part

if TYPE_CHECKING:
    from zenflow.step.engine import Engine

_log = logging.getLogger(__name__)


def format_there(saved: Mapping[str, Any]) -> str:
    """Return the `host_state` of a saved state; earlier versions knew one."""
    return str(saved["config"].get("host_state", ZenFlowConfig().host_state))


def is_converted(engine: Engine, saved: Mapping[str, Any]) -> bool:
    """Whether a state has another format than the engine."""
    return format_there(saved) != engine.config.host_state


def depth_of(engine: Engine) -> int:
    """Return q, the largest number of a column's gradients that wait on the host."""
    tasks = engine.schedule.tasks
    return tasks.depth if isinstance(tasks, ExactTasks) else 1


def tensors_there(
    split: SplitParam, saved: Mapping[str, Any], shapes: Mapping[str, torch.Size]
) -> dict[str, torch.Size]:
    """Return the shapes of a parameter's entry in a state of the other format.

    Args:
        split: The parameter.
        saved: The engine's part of the state.
        shapes: Shapes that the entry has in the engine's own format.
    """
    own, kind = type(split.host.state).NAMES, _kind(saved)
    others = {name: shape for name, shape in shapes.items() if name not in own}
    num_rows = shapes["step"][0]
    widths = zip(kind.NAMES, kind.widths(split.whole_rows), strict=True)
    return others | {name: torch.Size([num_rows, width]) for name, width in widths}


def take_up(split: SplitParam, saved: Mapping[str, Any], entry: Mapping[str, Tensor]) -> None:
    """Take weights and moments up; those of the other format are rounded where it has more."""
    kind = _kind(saved)
    tensors = [taken_part(split, name, entry[name]).to("cpu") for name in kind.NAMES]
    split.host.take_up(kind(*tensors))


def tell_of_conversion(engine: Engine, saved: Mapping[str, Any]) -> None:
    """Say that a run goes on with another format of the host's state."""
    if is_converted(engine, saved):
        own = engine.config.host_state
        _log.warning(
            "the state was saved with host_state=%r, and goes on with %r: %s",
            *(format_there(saved), own),
            "its weights and moments are rounded to nearest once"
            if engine.config.is_compact
            else "its weights and moments are kept, and are not rounded any more",
        )


def _kind(saved: Mapping[str, Any]) -> type[RowState]:
    return state_kind(ZenFlowConfig.from_dict(saved["config"]))
