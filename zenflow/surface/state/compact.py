"""States without what follows from the rest of them: for files that are loaded whole.

A full state has the same names and shapes at every step, as loading in place needs them. Much of
it is then in it twice, or is nothing: weights that are their masters rounded, updates in flight
where none is, and sums of windows that have not begun. A compact state leaves that out, and lists
what it leaves out, so that a damaged state is still told from it. Only what is there bit for bit
counts: deferred weights that fresh steps have moved stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zenflow.columns.layout import SplitParam
from zenflow.rule.blocks import important_count
from zenflow.surface.state.parameter import LANDING, TRAINING

if TYPE_CHECKING:
    from zenflow.step.engine import Engine

LEFT_OUT = "left_out"
"""Key, in the engine's part of a compact state, of the names that each split parameter lacks."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def can_be_compact(engine: Engine) -> bool:
    """Whether one rank can tell what follows from the rest: it has all rows of all parameters."""
    layout = engine.layout
    return layout.shards.group is None and layout.shares.group is None


def compact_entry(split: SplitParam, entry: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a drained parameter's entry of a state without what follows from its rest.

    Args:
        split: The parameter. Its staging has the weights of training.
        entry: What `param_state` says of it; its updates in flight are none that is live.
    """
    kept = {name: tensor for name, tensor in entry.items() if name != LANDING}
    if all(_is_master(block.host.staging, block.host.master) for block in split.blocks):
        del kept[TRAINING]
    flying = [block for block in split.blocks if block.landing is not None]
    values = [block.landing.values for block in flying if block.landing is not None]
    masters = [block.host.master for block in flying]
    if not all(map(_is_master, values, masters)):
        kept[LANDING] = values[0] if len(values) == 1 else torch.cat(values)
    in_use = {f"accumulator_{block.accumulator}" for block in split.blocks if block.count}
    return {
        name: tensor
        for name, tensor in kept.items()
        if name in in_use or not name.startswith("accumulator_")
    }


def _is_master(weights: Tensor, masters: Tensor) -> bool:
    """Whether weights are masters rounded, bit for bit: zeros have signs."""
    bits = _BITS[weights.element_size()]
    return torch.equal(weights.view(bits), masters.to(weights.dtype).view(bits))


def rows_in_flight(split: SplitParam, saved: Mapping[str, Any]) -> dict[int, int]:
    """Return the number of deferred rows of each block that has an update in flight in a state.

    Args:
        split: The parameter, in whatever layout.
        saved: The state's part of the engine.
    """
    flying = {index for index, _, _ in saved["landings"]}
    widths = {block.index: block.shape.num_columns for block in split.blocks}
    return {
        index: width - important_count(saved["topk_ratio"], width)
        for index, width in widths.items()
        if index in flying
    }
