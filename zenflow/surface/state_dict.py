"""The optimizer's state as a dictionary, and back: exact at every step.

Before the first step it has no tensors: all of them follow from the weights and the configuration.
Trainers that bring a new optimizer's state to the GPU then bring nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zenflow.columns.device_rows import Resident
from zenflow.columns.layout import Landing, SplitParam
from zenflow.errors import CheckpointError
from zenflow.knobs import Knobs
from zenflow.lanes.completion import already_done
from zenflow.rule.blocks import important_count
from zenflow.step.host_tasks import AbstractHostTasks
from zenflow.surface.parameter_state import param_state
from zenflow.surface.restart import restart, take_weights

if TYPE_CHECKING:
    from zenflow.step.engine import Engine
    from zenflow.surface.true_weights import TrueWeights

FORMAT = 3
"""Version of the state; raised when the meaning of an entry changes."""


def _shapes(
    place: SplitParam | Resident, tasks: AbstractHostTasks, topk_ratio: float
) -> dict[str, torch.Size]:
    """Return the shapes that `param_state` has in a layout of this ratio."""
    shapes = {name: tensor.shape for name, tensor in param_state(place, tasks).items()}
    if isinstance(place, Resident):
        return shapes
    widths = [block.shape.num_columns for block in place.blocks]
    important = sum(important_count(topk_ratio, width) for width in widths)
    for name, shape in shapes.items():
        if name not in ("scores", "mean_squares", "row_mean_squares"):
            is_device = name.startswith("device_") or name == "important_columns"
            rows = important if is_device else place.num_columns - important
            shapes[name] = torch.Size([rows, *shape[1:]])
    return shapes


def _signature(places: Sequence[SplitParam | Resident]) -> list[str]:
    """Describe each parameter so that a state of another model is told apart."""
    return [
        f"{tuple(place.param.shape)} {place.param.dtype} group {place.group} "
        + ("resident" if isinstance(place, Resident) else "split")
        for place in places
    ]


def save_engine_state(engine: Engine, true_weights: TrueWeights) -> dict[str, Any]:
    """Return all that is not a parameter's: calendar, counts, updates in flight.

    Also fills every `training_weight`, which shares memory with the staging buffers.
    """
    if engine.step:
        true_weights.stash()
    blocks = engine.layout.blocks
    return {
        "format": FORMAT,
        "config": engine.config.to_dict(),
        "signature": _signature(engine.layout.places),
        "step": engine.step,
        "topk_ratio": engine.layout.topk_ratio,
        "calendar": engine.calendar.state_dict(),
        "counts": [block.count for block in blocks],
        "accumulators": [block.accumulator for block in blocks],
        "wants_selection": [block.wants_selection for block in blocks],
        "num_steps": [split.num_steps for split in engine.layout.splits],
        "clip_factor": 1.0 if engine.fresh is None else float(engine.fresh.clip),
        "decision_log": [[step, knobs.to_dict()] for step, knobs in engine.decisions.log],
        "report": engine.reporter.state_dict(),
        "sketch": None if engine.probes.sketch is None else engine.probes.sketch.state_dict(),
        "controller": engine.decisions.controller.state_dict(),
        "landings": [
            {
                "block": block.index,
                "land_step": block.landing.land_step,
                "opened": block.landing.opened,
                "values": block.landing.values,
            }
            for block in blocks
            if block.landing is not None
        ],
    }


def has_steps(state_dict: Mapping[str, Any]) -> bool:
    """Whether a state has tensors, as every state has in which a step was taken."""
    return bool(state_dict["state"]) or state_dict["zenflow"]["step"] > 0


def check_group_sizes(
    groups: Sequence[Mapping[str, Any]], saved_groups: Sequence[Mapping[str, Any]]
) -> None:
    """Refuse a state whose parameter groups are others, those of frozen parameters included.

    Raises:
        CheckpointError: It has other numbers of groups or parameters.
    """
    here, there = ([len(group["params"]) for group in each] for each in (groups, saved_groups))
    if here != there:
        raise CheckpointError(
            f"the checkpoint has parameter groups of {there} parameters, and this optimizer of "
            f"{here}: make the groups that were saved"
        )


def check_state(
    engine: Engine, order: Mapping[int, SplitParam | Resident], state_dict: Mapping[str, Any]
) -> None:
    """Refuse a state that is not of this model and configuration, before anything is changed.

    Raises:
        CheckpointError: It is not; the message says what differs.
    """
    saved: Any = state_dict.get("zenflow")
    _check_rule(engine, saved)
    _check_layout(engine, saved)
    for index, place in order.items() if has_steps(state_dict) else ():
        have = state_dict["state"].get(index, {})
        want = _shapes(place, engine.schedule.tasks, saved["topk_ratio"])
        wrong = [
            name for name, shape in want.items() if name not in have or have[name].shape != shape
        ]
        if wrong:
            raise CheckpointError(
                f"the checkpoint's state of {place.name} lacks or misshapes {', '.join(wrong)}: "
                "the file is damaged or was edited; use another checkpoint"
            )
        unknown = [name for name in have if name not in want]
        if unknown:
            raise CheckpointError(
                f"the checkpoint's state of {place.name} has {', '.join(unknown)} besides: it was "
                "made with a controller that may lengthen windows, and this optimizer has none; "
                "make it with the same kind of controller"
            )


def _check_rule(engine: Engine, saved: Any) -> None:
    """Refuse a state of another format or configuration."""
    if not isinstance(saved, Mapping) or saved.get("format") != FORMAT:
        raise CheckpointError(
            "this is not a state of ZenFlowAdamW of this version, whose host takes an AdamW step "
            "for every gradient: start the optimizer anew from the model's weights"
        )
    config = engine.config.to_dict()
    differing = [
        f"{key} is {saved['config'].get(key)!r} there and {value!r} here"
        for key, value in config.items()
        if saved["config"].get(key) != value and key != "queue_depth"  # changes no result
    ]
    if differing:
        raise CheckpointError(
            f"the checkpoint has another configuration: {'; '.join(differing)}. Make the "
            "optimizer with the checkpoint's configuration"
        )


def _check_layout(engine: Engine, saved: Mapping[str, Any]) -> None:
    """Refuse a state of another model, or of parameters that were shared out in another way."""
    here = _signature(engine.layout.places)
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


@torch.no_grad()
def load_engine_state(
    engine: Engine,
    order: Mapping[int, SplitParam | Resident],
    true_weights: TrueWeights,
    state_dict: Mapping[str, Any],
) -> None:
    """Take up a state; afterwards training's weights are on the device.

    With a state without steps these are the weights as they are.

    Args:
        engine: A drained engine.
        order: Every trainable parameter's place by its index in torch's state.
        true_weights: Its swap of weights; what it shows is replaced.
        state_dict: State of the optimizer's `state_dict`, on any device.
    """
    check_state(engine, order, state_dict)
    saved = state_dict["zenflow"]
    engine.decisions.controller.load_state_dict(saved["controller"])  # first: it may refuse
    is_started = has_steps(state_dict)
    if not is_started:
        take_weights(engine)  # a change of k writes some of them
    if engine.layout.topk_ratio != saved["topk_ratio"]:
        engine.resize(saved["topk_ratio"])
    if is_started:
        _load_params(engine, order, state_dict["state"])
    else:
        restart(engine)
    engine.step = int(saved["step"])
    engine.calendar.load_state_dict(saved["calendar"])
    engine.decisions.log[:] = [
        (int(step), Knobs.from_dict(knobs)) for step, knobs in saved["decision_log"]
    ]
    engine.reporter.load_state_dict(saved["report"])
    _load_blocks(engine, saved)
    for split, count in zip(engine.layout.splits, saved["num_steps"], strict=True):
        split.num_steps = int(count)
    if engine.fresh is not None:
        engine.fresh.clip.fill_(saved["clip_factor"])
        engine.fresh.forget()
    if engine.probes.sketch is not None:
        engine.probes.sketch.load_state_dict(saved["sketch"])
    if is_started:
        true_weights.restore()
    else:
        true_weights.forget()


def _load_params(
    engine: Engine,
    order: Mapping[int, SplitParam | Resident],
    states: Mapping[int, Mapping[str, Tensor]],
) -> None:
    """Set every parameter's tensors, and the weights that follow from them."""
    for index, place in order.items():
        for name, tensor in param_state(place, engine.schedule.tasks).items():
            tensor.copy_(states[index][name])
    for split in engine.layout.splits:
        split.columns.is_important.zero_()
        split.columns.is_important[split.important_columns] = True
        split.show_important()
    for resident in engine.layout.residents:
        if resident.has_master:
            resident.param.data.copy_(resident.master)


def _load_blocks(engine: Engine, saved: Mapping[str, Any]) -> None:
    """Set every block's window and put updates in flight back in flight."""
    blocks = engine.layout.blocks
    for block in blocks:
        block.count = int(saved["counts"][block.index])
        block.accumulator = int(saved["accumulators"][block.index])
        block.wants_selection = bool(saved["wants_selection"][block.index])
        block.landing = None
        block.staging_free = block.last_update = already_done()
    engine.uploads.reset()
    by_step: dict[int, list[Mapping[str, Any]]] = {}
    for entry in saved["landings"]:
        by_step.setdefault(int(entry["land_step"]), []).append(entry)
    for land_step, entries in by_step.items():
        members = [blocks[int(entry["block"])] for entry in entries]
        buffer = engine.uploads.take(members)
        for block, entry in zip(members, entries, strict=True):
            values = buffer.view_of(block)
            values.copy_(entry["values"])
            Landing(
                block=block,
                values=values,
                buffer=buffer,
                land_step=land_step,
                opened=int(entry["opened"]),
                copied=(),
                computed=already_done(),
            ).begin()
