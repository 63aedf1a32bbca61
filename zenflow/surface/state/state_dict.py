"""The optimizer's state as a dictionary, and back: exact at every step.

It has torch's two keys. Tensors are in "state", and all else is a text (JSON) in the first
parameter group: tools that rearrange states, such as `torch.distributed.checkpoint`, carry both.

Before the first step it has no tensors: all of them follow from the weights and the configuration.
Trainers that bring a new optimizer's state to the GPU then bring nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zenflow.columns.device_rows import Resident
from zenflow.columns.layout import Block, Landing, SplitParam
from zenflow.knobs import Knobs
from zenflow.lanes.completion import already_done
from zenflow.surface.state.checks import ENTRY, FORMAT, check_state, has_steps, signature
from zenflow.surface.state.parameter import (
    LANDING,
    landing_weight,
    param_state,
    shown_state,
    taken_part,
)
from zenflow.surface.state.restart import end_windows, restart, take_weights

if TYPE_CHECKING:
    from zenflow.step.engine import Engine
    from zenflow.surface.true_weights import TrueWeights


def add_engine_state(
    engine: Engine,
    true_weights: TrueWeights,
    places: Mapping[int, SplitParam | Resident],
    state_dict: dict[str, Any],
) -> None:
    """Add to torch's part of a state what it lacks, the entries of live parameters left as are.

    Also fills every `training_weight`, which shares memory with the staging buffers.

    Args:
        engine: A drained engine.
        true_weights: Its swap of weights.
        places: Every trainable parameter's place by its number in torch's part.
        state_dict: Torch's part, changed.
    """
    states = state_dict["state"]
    if states:
        true_weights.stash()
    for index, place in places.items():
        if index in states and isinstance(place, SplitParam):
            landing = shown_state(place, {LANDING: landing_weight(place)})
            states[index] = {**states[index], **landing}
    state_dict["param_groups"][0][ENTRY] = json.dumps(_engine_state(engine))


def _engine_state(engine: Engine) -> dict[str, Any]:
    """Return all that is not a tensor: calendar, counts, which updates are in flight."""
    blocks = engine.layout.blocks
    sketch = engine.probes.sketch
    return {
        "format": FORMAT,
        "config": engine.config.to_dict(),
        "signature": signature(engine.layout.places),
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
        "sketch": None if sketch is None else sketch.state_dict(),
        "controller": engine.decisions.controller.state_dict(),
        "landings": [
            [block.index, block.landing.land_step, block.landing.opened]
            for block in blocks
            if block.landing is not None
        ],
    }


@torch.no_grad()
def load_engine_state(
    engine: Engine,
    order: Mapping[Any, SplitParam | Resident],
    true_weights: TrueWeights,
    state_dict: Mapping[str, Any],
    saved: Mapping[str, Any],
) -> None:
    """Take up a state; afterwards training's weights are on the device.

    With a state without steps these are the weights as they are.

    Args:
        engine: A drained engine.
        order: Every trainable parameter's place by its key in the state.
        true_weights: Its swap of weights; what it shows is replaced.
        state_dict: State of the optimizer's `state_dict`, on any device.
        saved: Its part of the engine.
    """
    with engine.layout.shares.all_or_none():
        check_state(engine, order, state_dict, saved)
        engine.decisions.controller.load_state_dict(saved["controller"])  # first: it may refuse
    is_started = has_steps(state_dict, saved)
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
    for split, count in zip(engine.layout.splits, saved["num_steps"], strict=True):
        split.num_steps = int(count)
    if engine.fresh is not None:
        engine.fresh.clip.fill_(saved["clip_factor"])
        engine.fresh.forget()
    if engine.probes.sketch is not None:
        engine.probes.sketch.load_state_dict(saved["sketch"])
    _load_blocks(engine, saved)
    if is_started:
        of_split = {
            place: taken_part(place, LANDING, state_dict["state"][key][LANDING])
            for key, place in order.items()
            if isinstance(place, SplitParam)
        }
        _load_landings(engine, saved["landings"], of_split)
        true_weights.restore()
    else:
        true_weights.forget()


def _load_params(
    engine: Engine,
    order: Mapping[Any, SplitParam | Resident],
    states: Mapping[Any, Mapping[str, Tensor]],
) -> None:
    """Set every parameter's tensors, and the weights that follow from them."""
    for key, place in order.items():
        for name, tensor in param_state(engine, place).items():
            if name != LANDING:
                tensor.copy_(taken_part(place, name, states[key][name]))
    for split in engine.layout.splits:
        split.columns.is_important.zero_()
        split.columns.is_important[split.important_columns] = True
        split.show_important()
    for resident in engine.layout.residents:
        if resident.has_master:
            resident.data.copy_(resident.master)


def _load_blocks(engine: Engine, saved: Mapping[str, Any]) -> None:
    """Set every block's window; nothing is in flight then."""
    end_windows(engine)
    for block in engine.layout.blocks:
        block.count = int(saved["counts"][block.index])
        block.accumulator = int(saved["accumulators"][block.index])
        block.wants_selection = bool(saved["wants_selection"][block.index])


def _load_landings(
    engine: Engine, landings: list[list[int]], values_of: Mapping[SplitParam, Tensor]
) -> None:
    """Put updates back in flight.

    Args:
        engine: The engine; nothing is in flight.
        landings: Block, step of the landing, and step after which the window began, of each.
        values_of: Weights by parameter, as `landing_weight` has them.
    """
    blocks = engine.layout.blocks
    by_step: dict[int, list[tuple[Block, int]]] = {}
    for index, land_step, opened in landings:
        by_step.setdefault(land_step, []).append((blocks[index], opened))
    rows_of = {
        block: rows
        for split, values in values_of.items()
        for block, rows in zip(
            split.blocks, values.split([b.shape.num_deferred for b in split.blocks]), strict=True
        )
    }
    for land_step, entries in by_step.items():
        buffer = engine.uploads.take([block for block, _ in entries])
        for block, opened in entries:
            values = buffer.view_of(block)
            values.copy_(rows_of[block])
            Landing(
                block=block,
                values=values,
                buffer=buffer,
                land_step=land_step,
                opened=opened,
                copied=(),
                computed=already_done(),
            ).begin()
