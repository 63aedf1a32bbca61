"""The optimizer's state as a dictionary, and back: exact at every step.

The dictionary has torch's two keys. Tensors are in "state". All other values are a text (JSON) in
the first parameter group: tools such as `torch.distributed.checkpoint` carry both.

Before the first step there are no tensors: all follow from the weights and the configuration. So
trainers that copy a new optimizer's state to the GPU copy nothing.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zenflow.columns.device_rows import Resident
from zenflow.columns.in_flight import PendingUpload
from zenflow.columns.layout import Block, SplitParam
from zenflow.knobs import Knobs
from zenflow.lanes.completion import already_done
from zenflow.surface.state.checks import ENTRY, FORMAT, check_state, has_steps, signature
from zenflow.surface.state.compact import (
    LEFT_OUT,
    can_be_compact,
    compact_entry,
    rows_in_flight,
)
from zenflow.surface.state.host_format import (
    depth_of,
    take_up,
    tell_of_conversion,
)
from zenflow.surface.state.on_drive import open_checkpoint, portable_states, reference
from zenflow.surface.state.parameter import (
    LANDING,
    TRAINING,
    landing_weight,
    param_state,
    shown_state,
    taken_part,
)
from zenflow.surface.state.restart import end_windows, restart, take_weights

if TYPE_CHECKING:
    from zenflow.step.engine import Engine
    from zenflow.surface.weights import Weights

_log = logging.getLogger(__name__)


def add_engine_state(
    engine: Engine,
    weights: Weights,
    places: Mapping[int, SplitParam | Resident],
    state_dict: dict[str, Any],
    *,
    is_compact: bool = False,
    is_portable: bool = False,
) -> None:
    """Add the engine's part to torch's part of a state; live parameters' entries do not change.

    Also fills every `training_weight`, which may be in the memory of gradients.

    Args:
        engine: A drained engine.
        weights: The swap between weights of training and true weights.
        places: Every trainable parameter's place by its number in torch's part.
        state_dict: Torch's part, changed.
        is_compact: Whether to make a compact state, where one rank can.
        is_portable: Whether the state has what is on a drive, in place of a reference to it.
    """
    states, left_out = state_dict["state"], {}
    if states:
        weights.stash()
    is_compact = is_compact and can_be_compact(engine)
    for index, place in places.items():
        if index not in states or not isinstance(place, SplitParam):
            continue
        if is_compact:
            entry = compact_entry(engine, place, states[index])
            left_out[place] = sorted(set(states[index]) - set(entry))
            states[index] = entry
        else:
            landing = shown_state(place, {LANDING: landing_weight(engine, place)})
            states[index] = {**states[index], **landing}
    saved = _engine_state(engine)
    if engine.drive is not None and states:
        if is_portable:
            whole = portable_states(engine)
            for index, place in places.items():
                if isinstance(place, SplitParam) and index in states:
                    states[index] = {**states[index], **whole[place]}
        else:
            saved |= reference(engine)
    if left_out:
        saved[LEFT_OUT] = [left_out[split] for split in engine.layout.splits]
    state_dict["param_groups"][0][ENTRY] = json.dumps(saved)


def _engine_state(engine: Engine) -> dict[str, Any]:
    """Return all values that are no tensors: calendar, counts, list of updates in flight."""
    sketch = engine.probes.sketch
    return {
        "format": FORMAT,
        "config": engine.config.to_dict(),
        "kernels": engine.device.kernels.name,
        "queue_depth": depth_of(engine),
        "signature": signature(engine.layout.places),
        "step": engine.step,
        "topk_ratio": engine.layout.topk_ratio,
        "calendar": engine.calendar.state_dict(),
        "counts": [window.count for window in engine.windows],
        "accumulators": list(engine.schedule.tasks.accumulators),
        "wants_selection": [window.wants_selection for window in engine.windows],
        "num_steps": [split.num_steps for split in engine.layout.splits],
        "clip_factor": 1.0 if engine.fresh is None else float(engine.fresh.clip),
        "decision_log": [[step, knobs.to_dict()] for step, knobs in engine.decisions.log],
        "report": engine.reporter.state_dict(),
        "sketch": None if sketch is None else sketch.state_dict(),
        "controller": engine.decisions.controller.state_dict(),
        "changed_uploads": None if engine.changed is None else engine.changed.state_dict(),
        "landings": [
            [block.index, update.land_step, update.opened]
            for block in engine.layout.blocks
            if (update := engine.in_flight.of(block)) is not None
        ],
    }


@torch.no_grad()
def load_engine_state(
    engine: Engine,
    order: Mapping[Any, SplitParam | Resident],
    weights: Weights,
    state_dict: Mapping[str, Any],
    saved: Mapping[str, Any],
    *,
    is_new: bool = False,
) -> None:
    """Take up a state; afterwards training's weights are on the device.

    With a state without steps, training's weights are the model's present ones.

    Args:
        engine: A drained engine.
        order: Every trainable parameter's place by its key in the state.
        weights: The swap between weights of training and true weights.
        state_dict: State of the optimizer's `state_dict`, on any device.
        saved: The engine's part of the state.
        is_new: Whether the engine is as it was made, and the model's weights are too. A trainer
            loads such an optimizer's own state, and a drive would be written once more.
    """
    with engine.layout.shares.all_or_none():
        check_state(engine, order, state_dict, saved)
        _tell_of_kernels(engine, saved)
        tell_of_conversion(engine, saved)
        engine.decisions.controller.load_state_dict(saved["controller"])  # first: it may refuse
    is_started = has_steps(state_dict, saved)
    stays = is_new and not is_started and engine.drive is not None
    if not is_started and not stays:
        take_weights(engine)  # a change of k writes some of them
    if engine.layout.topk_ratio != saved["topk_ratio"]:
        engine.resize(saved["topk_ratio"])
    if is_started:
        _load_params(engine, order, state_dict["state"], saved)
    elif not stays:
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
    if engine.probes.sketch is not None:
        engine.probes.sketch.load_state_dict(saved["sketch"])
    _load_blocks(engine, saved, is_started=is_started)
    if is_started:
        of_block: dict[int, Tensor] = {}
        for key, place in order.items():
            if isinstance(place, SplitParam):
                of_block |= _rows_that_land(place, state_dict["state"][key], saved)
        _load_landings(engine, saved["landings"], of_block)
        weights.restore()


def _tell_of_kernels(engine: Engine, saved: Mapping[str, Any]) -> None:
    """Say that a run goes on with other kernels; states of earlier versions know none."""
    before, own = saved.get("kernels"), engine.device.kernels.name
    if before is not None and before != own:
        _log.warning(
            "the state was saved by a run with kernels=%r, and goes on with %r: results differ "
            "from that run's by rounding",
            before,
            own,
        )


def _load_params(
    engine: Engine,
    order: Mapping[Any, SplitParam | Resident],
    states: Mapping[Any, Mapping[str, Tensor]],
    saved: Mapping[str, Any],
) -> None:
    """Set every parameter's tensors, and the device's weights that follow from these."""
    left_out = _left_out(engine, saved)
    is_in_place = open_checkpoint(engine, saved)
    for key, place in order.items():
        lacks = {LANDING, *left_out.get(place, ())}
        if isinstance(place, SplitParam):
            if not is_in_place:
                take_up(place, saved, states[key])
            lacks.update(place.host.state.NAMES)
        for name, tensor in param_state(engine, place).items():
            if name not in lacks:
                tensor.copy_(taken_part(place, name, states[key][name]))
        if isinstance(place, SplitParam) and TRAINING in lacks:
            engine.training.of(place).copy_(place.host.weights(place.param.dtype))
    for split in engine.layout.splits:
        split.note_owners()
        split.show_important()
    for resident in engine.layout.residents:
        if resident.has_master:
            resident.data.copy_(resident.master)


def _load_blocks(engine: Engine, saved: Mapping[str, Any], *, is_started: bool) -> None:
    """Set every block's window; nothing is in flight then."""
    end_windows(engine)
    for index, window in enumerate(engine.windows):
        window.count = int(saved["counts"][index])
        window.wants_selection = bool(saved["wants_selection"][index])
    engine.schedule.tasks.accumulators[:] = map(int, saved["accumulators"])
    if engine.changed is None:
        return
    if is_started:
        engine.changed.load_state_dict(saved["changed_uploads"])
    else:
        engine.changed.begin_anew()


def _left_out(
    engine: Engine, saved: Mapping[str, Any]
) -> dict[SplitParam | Resident, Sequence[str]]:
    """Return the names of tensors that each split parameter lacks; none in a full state."""
    if LEFT_OUT not in saved:
        return {}
    return dict(zip(engine.layout.splits, saved[LEFT_OUT], strict=True))


def _rows_that_land(
    split: SplitParam, entry: Mapping[str, Tensor], saved: Mapping[str, Any]
) -> dict[int, Tensor]:
    """Return the weights of a parameter's updates in flight by block; masters are loaded."""
    flying = rows_in_flight(split, saved)
    if LANDING not in entry:
        blocks = {block.index: block for block in split.blocks}
        return {index: blocks[index].host.weights(split.param.dtype) for index in flying}
    values = taken_part(split, LANDING, entry[LANDING])
    if LEFT_OUT in saved:
        return dict(zip(flying, values.split(list(flying.values())), strict=True))
    rows = values.split([block.shape.num_deferred for block in split.blocks])
    return {block.index: own for block, own in zip(split.blocks, rows, strict=True)}


def _load_landings(
    engine: Engine, landings: list[list[int]], rows_of: Mapping[int, Tensor]
) -> None:
    """Put a state's updates back in flight.

    Args:
        engine: The engine; nothing is in flight.
        landings: Block, step of the landing, and step after which the window began, of each.
        rows_of: Weights by block, as the host's rows are.
    """
    blocks = engine.layout.blocks
    by_step: dict[int, list[tuple[Block, int]]] = {}
    for index, land_step, opened in landings:
        by_step.setdefault(land_step, []).append((blocks[index], opened))
    for land_step, entries in by_step.items():
        buffer = engine.uploads.take([block for block, _ in entries])
        for block, opened in entries:
            values, lease = buffer.next_piece(block.host_shape, block.split.param.dtype)
            values.copy_(rows_of[block.index])
            engine.in_flight.begin(
                PendingUpload(
                    block=block,
                    values=values,
                    lease=lease,
                    buffer=buffer,
                    land_step=land_step,
                    opened=opened,
                    copied=(),
                    computed=already_done(),
                )
            )
