"""Checks that a saved state fits the optimizer that takes it up."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from zenflow.columns.device_rows import Resident
from zenflow.columns.layout import SplitParam
from zenflow.config import ZenFlowConfig
from zenflow.errors import CheckpointError
from zenflow.rule.blocks import important_count
from zenflow.surface.state.compact import LEFT_OUT, rows_in_flight
from zenflow.surface.state.host_format import depth_of, is_converted, tensors_there
from zenflow.surface.state.on_drive import check_drive
from zenflow.surface.state.parameter import (
    LANDING,
    WHOLE,
    has_rows_of_another_rank,
    param_state,
    shown_state,
)

if TYPE_CHECKING:
    from zenflow.step.engine import Engine

FORMAT = 4
"""Version of the state; raised when the meaning of an entry changes."""
_FREE = ("queue_depth", "host_state")
"""Settings that may differ: the first changes no result of float32 states, the other is converted.
"""
ENTRY = "zenflow"
"""Key, in the first parameter group, of the engine's part of a state."""


def saved_engine(state_dict: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the engine's part of a state; None for a state of torch's AdamW.

    Raises:
        CheckpointError: The state is of neither optimizer.
    """
    groups = state_dict.get("param_groups")
    if not groups or "state" not in state_dict or "zenflow" in state_dict:
        raise _foreign()
    text = groups[0].get(ENTRY)
    if text is None:
        return None
    try:
        saved = json.loads(text)
    except (TypeError, ValueError) as error:
        raise _foreign() from error
    if not isinstance(saved, dict) or saved.get("format") != FORMAT:
        raise _foreign()
    return saved


def _foreign() -> CheckpointError:
    return CheckpointError(
        "this is a state neither of ZenFlowAdamW of this version nor of torch.optim.AdamW: start "
        "the optimizer anew from the model's weights"
    )


def places_by_key(
    param_groups: Sequence[Mapping[str, Any]],
    places: Mapping[Any, SplitParam | Resident],
    state_dict: Mapping[str, Any],
) -> dict[Any, SplitParam | Resident]:
    """Return every trainable parameter's place by its key in a state: a number, or a name.

    Parameters correspond by their order, as in torch's `load_state_dict`.

    Raises:
        CheckpointError: The state's groups are of other sizes.
    """
    there = [list(group["params"]) for group in state_dict["param_groups"]]
    here = [group["params"] for group in param_groups]
    if [len(keys) for keys in there] != [len(params) for params in here]:
        raise CheckpointError(
            f"the checkpoint has parameter groups of {list(map(len, there))} parameters, and this "
            f"optimizer of {list(map(len, here))}: make the groups that were saved"
        )
    pairs = zip(chain.from_iterable(there), chain.from_iterable(here), strict=True)
    return {key: places[param] for key, param in pairs if param in places}


def signature(places: Sequence[SplitParam | Resident]) -> list[str]:
    """Describe each parameter, to recognize a state of another model."""
    return [
        f"{tuple(place.param.shape)} {place.param.dtype} group {place.group} "
        + ("resident" if isinstance(place, Resident) else "split")
        for place in places
    ]


def has_steps(state_dict: Mapping[str, Any], saved: Mapping[str, Any]) -> bool:
    """Whether a state has tensors: every state has some once a step was taken."""
    return bool(state_dict["state"]) or saved["step"] > 0


def check_state(
    engine: Engine,
    order: Mapping[Any, SplitParam | Resident],
    state_dict: Mapping[str, Any],
    saved: Mapping[str, Any],
) -> None:
    """Refuse a state that is not of this model and configuration, before anything is changed.

    Args:
        engine: The engine that would take it up.
        order: Every trainable parameter's place by its key in the state.
        state_dict: The state.
        saved: The engine's part of the state.

    Raises:
        CheckpointError: The state does not fit; the message says what differs.
    """
    _check_config(engine, saved)
    _check_layout(engine, saved)
    is_started = has_steps(state_dict, saved)
    is_in_place = check_drive(engine, saved, has_steps=is_started)
    for key, place in order.items() if is_started else ():
        have = state_dict["state"].get(key, {})
        want = _compact_shapes(engine, place, saved, _shapes(engine, place, saved["topk_ratio"]))
        if isinstance(place, SplitParam) and is_in_place:
            want = {n: shape for n, shape in want.items() if n not in place.host.state.NAMES}
        elif isinstance(place, SplitParam) and is_converted(engine, saved):
            want = tensors_there(place, saved, want)
        wrong = [
            name for name, shape in want.items() if name not in have or have[name].shape != shape
        ]
        if wrong:
            raise CheckpointError(
                f"the checkpoint's state of {place.name} lacks or misshapes {', '.join(wrong)}: "
                "the file is damaged or was edited; use another checkpoint"
            )
        if any(has_rows_of_another_rank(place, name, have[name]) for name in want):
            raise CheckpointError(
                f"the checkpoint's state of {place.name} has rows of another rank only: ranks "
                "that have some rows each save by torch.distributed.checkpoint, or one of them "
                "what get_optimizer_state_dict gives it with full_state_dict=True; a torch.save "
                "on one rank lacks the others' rows"
            )
        unknown = [name for name in have if name not in want]
        if unknown:
            raise CheckpointError(
                f"the checkpoint's state of {place.name} has {', '.join(unknown)} besides: it was "
                "made with a controller that may lengthen windows, and this optimizer has none; "
                "make it with the same kind of controller"
            )


def _shapes(
    engine: Engine, place: SplitParam | Resident, topk_ratio: float
) -> dict[str, torch.Size]:
    """Return the shapes that `param_state` has in a layout of this ratio."""
    tensors = param_state(engine, place)
    if isinstance(place, SplitParam):
        tensors |= place.host.state_by_name()
    shown = shown_state(place, tensors)
    shapes = {name: tensor.shape for name, tensor in shown.items()}
    if isinstance(place, Resident):
        return shapes
    widths = [block.shape.num_columns for block in place.blocks]
    important = sum(important_count(topk_ratio, width) for width in widths)
    for name, shape in shapes.items():
        if name not in WHOLE:
            is_device = name.startswith("device_") or name == "important_columns"
            rows = important if is_device else place.num_columns - important
            shapes[name] = torch.Size([rows, *shape[1:]])
    return shapes


def _compact_shapes(
    engine: Engine,
    place: SplitParam | Resident,
    saved: Mapping[str, Any],
    shapes: dict[str, torch.Size],
) -> dict[str, torch.Size]:
    """Return the tensor shapes to expect in a compact state, by what it says it leaves out."""
    if LEFT_OUT not in saved or isinstance(place, Resident):
        return shapes
    lacks = saved[LEFT_OUT][engine.layout.splits.index(place)]
    flying = sum(rows_in_flight(place, saved).values())
    shapes[LANDING] = torch.Size([flying, *shapes[LANDING][1:]])
    return {name: shape for name, shape in shapes.items() if name not in lacks}


def _check_config(engine: Engine, saved: Mapping[str, Any]) -> None:
    """Refuse a state of another configuration; an earlier version knew fewer settings."""
    there = {**ZenFlowConfig().to_dict(), **saved["config"]}
    differing = [
        f"{key} is {there[key]!r} there and {value!r} here"
        for key, value in engine.config.to_dict().items()
        if there[key] != value and key not in _FREE
    ]
    if engine.config.is_compact and not is_converted(engine, saved):
        depth = depth_of(engine)
        if saved["queue_depth"] != depth:  # how often the state is rounded
            differing.append(f"queue_depth is {saved['queue_depth']} there and {depth} here")
    if differing:
        raise CheckpointError(
            f"the checkpoint has another configuration: {'; '.join(differing)}. Make the "
            "optimizer with the checkpoint's configuration"
        )


def _check_layout(engine: Engine, saved: Mapping[str, Any]) -> None:
    """Refuse a state of another model, or of parameters that were shared out in another way."""
    here = signature(engine.layout.places)
    if list(saved["signature"]) != here:
        pairs = zip(saved["signature"], here, strict=False)
        first = next((f"{a} there, {b} here" for a, b in pairs if a != b), "their numbers")
        raise CheckpointError(
            f"the checkpoint is of another model: {len(saved['signature'])} trainable parameters "
            f"there, {len(here)} here; first difference: {first}. Build the model that was saved"
        )
    if len(saved["counts"]) != len(engine.layout.blocks):
        raise CheckpointError(
            f"the checkpoint has {len(saved['counts'])} blocks and this optimizer "
            f"{len(engine.layout.blocks)}: make it with a controller of the same "
            "largest_interval, and with the version of this package that saved it"
        )
    if saved["topk_ratio"] < engine.layout.least_topk_ratio:
        raise CheckpointError(
            f"the checkpoint has a topk_ratio of {saved['topk_ratio']:g} and this optimizer host "
            f"memory for {engine.layout.least_topk_ratio:g} or more: make it with a controller of "
            "the same least_topk_ratio"
        )
