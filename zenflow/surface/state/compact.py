"""Compact states, without tensors that follow from others: for files that are loaded whole.

A full state has the same names and shapes at every step, because loading in place needs them. So
some tensors are redundant: weights that are rounded masters, updates in flight where none is, and
sums of windows that have not begun. A compact state leaves these out and lists their names, so
that a damaged state is told from a compact one. A tensor is left out only if it follows bit for
bit: deferred weights that fresh steps have moved stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zenflow.columns.layout import Block, SplitParam
from zenflow.rule.blocks import important_count
from zenflow.surface.state.parameter import LANDING, TRAINING

if TYPE_CHECKING:
    from zenflow.step.engine import Engine

LEFT_OUT = "left_out"
"""Key, in the engine's part of a compact state, of the names that each split parameter lacks."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def can_be_compact(engine: Engine) -> bool:
    """Whether this rank can find redundant tensors: it has all rows of all parameters."""
    layout = engine.layout
    return layout.shards.group is None and layout.shares.group is None


def compact_entry(
    engine: Engine, split: SplitParam, entry: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return a drained parameter's entry of a compact state.

    Args:
        engine: A drained engine.
        split: The parameter, whose weights of training are at hand.
        entry: Values of `param_state`, whose `LANDING` is no live tensor.
    """
    kept = {name: tensor for name, tensor in entry.items() if name != LANDING}
    training = engine.training.of_blocks(split)
    if all(map(_is_true, training, split.blocks)):
        del kept[TRAINING]
    found = [engine.in_flight.of(block) for block in split.blocks]
    flying = [update for update in found if update is not None]
    values = [update.values for update in flying]
    if not all(_is_true(update.values, update.block) for update in flying):
        kept[LANDING] = values[0] if len(values) == 1 else torch.cat(values)
    accumulators, windows = engine.schedule.tasks.accumulators, engine.windows
    begun = [block.index for block in split.blocks if windows[block.index].count]
    in_use = {f"accumulator_{accumulators[index]}" for index in begun}
    return {
        name: tensor
        for name, tensor in kept.items()
        if name in in_use or not name.startswith("accumulator_")
    }


def _is_true(weights: Tensor, block: Block) -> bool:
    """Whether weights are a block's rounded masters, bit for bit, signs of zeros included."""
    bits = _BITS[weights.element_size()]
    return torch.equal(weights.view(bits), block.host.weights(weights.dtype).view(bits))


def rows_in_flight(split: SplitParam, saved: Mapping[str, Any]) -> dict[int, int]:
    """Return the number of deferred rows of each block that has an update in flight in a state.

    Args:
        split: The parameter, in any layout.
        saved: The engine's part of the state.
    """
    flying = {index for index, _, _ in saved["landings"]}
    widths = {block.index: block.shape.num_columns for block in split.blocks}
    return {
        index: width - important_count(saved["topk_ratio"], width)
        for index, width in widths.items()
        if index in flying
    }
