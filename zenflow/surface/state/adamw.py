"""A state of `torch.optim.AdamW` taken up in mid-run, and one written.

The host and the device hold AdamW's moments of all gradients so far, column by column. Torch's
tensors of a parameter (O, I) are their transposes put together.

With factored second moments a state that is written has the products of rows' and columns'
moments, and first moments that are multiplied by their roots. A state that is read gives the
factors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zenflow.columns.device_rows import Resident
from zenflow.columns.layout import Block, SplitParam
from zenflow.columns.shards import RowSpread, Shards, part_of, spread
from zenflow.errors import CheckpointError
from zenflow.rule.importance import select_columns
from zenflow.step.fresh.factors import LEAST_ROOT
from zenflow.surface.state.restart import restart, take_weights

if TYPE_CHECKING:
    from zenflow.step.engine import Engine

_MOMENTS = ("exp_avg", "exp_avg_sq")
_OF_ADAMW = {"betas", "amsgrad"}
"""Keys that only AdamW's groups have: RAdam's moments have the same names."""


def check_adamw_state(
    order: Mapping[Any, SplitParam | Resident], state_dict: Mapping[str, Any]
) -> None:
    """Refuse a state that is none of AdamW over these parameters, before anything is changed.

    Raises:
        CheckpointError: The state does not fit; the message says why.
    """
    for group in state_dict["param_groups"]:
        is_adam = not group.get("decoupled_weight_decay", True) and group.get("weight_decay", 0)
        flags = [name for name in ("amsgrad", "maximize") if group.get(name)]
        if is_adam or flags or not set(group).issuperset(_OF_ADAMW):
            what = ", ".join(flags) or "one without AdamW's settings"
            if is_adam:
                what = "Adam with its coupled weight decay"
            raise CheckpointError(
                f"the state is of another optimizer ({what}): only that of "
                "torch.optim.AdamW can be taken up"
            )
    for key, place in order.items():
        state = state_dict["state"].get(key)
        if state is None:
            continue  # it has had no gradient
        missing = [name for name in ("step", *_MOMENTS) if name not in state]
        if missing:
            raise CheckpointError(
                f"the state of {place.name} lacks {', '.join(missing)}: only that of "
                "torch.optim.AdamW can be taken up"
            )
        shape = state["exp_avg"].shape
        if shape != place.param.shape:
            raise CheckpointError(
                f"the state is of another model: {place.name} has shape {tuple(shape)} there and "
                f"{tuple(place.param.shape)} here. Build the model that was saved"
            )


@torch.no_grad()
def load_adamw_state(
    engine: Engine, order: Mapping[Any, SplitParam | Resident], state_dict: Mapping[str, Any]
) -> None:
    """Take up AdamW's moments and step counts; the weights are the model's present ones.

    Columns are chosen by AdamW's second moments. The step count goes on from AdamW's, so that a
    warm-up of the first steps is over.

    Args:
        engine: A drained engine.
        order: Every trainable parameter's place by its key in the state.
        state_dict: AdamW's state, on any device.
    """
    states = {place: state_dict["state"].get(key) for key, place in order.items()}
    groups = state_dict["param_groups"]
    restart(engine)
    for place, state in states.items():
        if state is None:
            continue
        if isinstance(place, SplitParam):
            beta2 = float(groups[place.group]["betas"][1])
            correction = 1.0 - beta2 ** float(state["step"])
            _load_split(place, state, correction, engine.layout.shards)
        else:
            for name in _MOMENTS:
                rows = RowSpread.of(place.param)
                getattr(place, name).copy_(part_of(state[name], rows, 0))
            place.step.fill_(float(state["step"]))
    take_weights(engine)
    engine.step = max((int(s["step"]) for s in states.values() if s is not None), default=0)
    engine.calendar.open_all([block.shape for block in engine.layout.blocks], engine.step)
    engine.reporter.load_state_dict(None)
    engine.decisions.log.clear()
    if engine.fresh is not None:
        engine.fresh.clip.fill_(1.0)
    if (sketch := engine.probes.sketch) is not None:
        is_whole = [True] * len(engine.layout.blocks)
        sketch.load_state_dict({"is_watching": sketch.is_watching, "is_whole": is_whole})


def _rows_of(split: SplitParam, whole: Tensor) -> Tensor:
    """Return this rank's rows of one of AdamW's moments, on the device, (O, I), float32."""
    rows = part_of(whole, RowSpread.of(split.param), 0)
    return split.matrix(rows.to(split.columns.scores.device, torch.float32))


def _load_split(
    split: SplitParam, state: Mapping[str, Any], correction: float, shards: Shards
) -> None:
    """Distribute a parameter's moments, those of the most energetic columns to the device."""
    avg_IO, square_IO = (_rows_of(split, state[name]).t() for name in _MOMENTS)
    sums_I = shards.add_up(square_IO.sum(dim=1))
    split.columns.mean_squares.copy_(sums_I / split.whole_rows)
    split.rows.mean_squares.copy_(square_IO.mean(dim=0)[: len(split.rows.mean_squares)])
    # Scores are averages of squared norms, which AdamW's second moments are but for their bias.
    split.columns.scores.copy_(sums_I / max(correction, 1e-12))
    for block in split.blocks:
        _choose(block)
    split.note_owners()
    split.num_steps = int(state["step"])
    bank_rows = slice(split.bank_first, split.bank_last)
    if not split.bank.has_second:
        avg_IO = avg_IO / _roots(split, correction).t()
        square_IO = square_IO[:, :0]
    own = [split.part.of(moments_IO, 1) for moments_IO in (avg_IO, square_IO)]
    split.host.set_moments(*(own_IO[split.deferred_columns] for own_IO in own))
    for name, moments_IO in zip(_MOMENTS, (avg_IO, square_IO), strict=True):
        getattr(split.bank, name)[bank_rows] = moments_IO[split.important_columns]
    split.host.step.fill_(split.num_steps)
    split.bank.step[bank_rows] = split.num_steps


def _choose(block: Block) -> None:
    """Choose a block's important columns by their scores, before its rows are in use."""
    none = torch.zeros(block.shape.num_columns, dtype=torch.bool, device="cpu")
    chosen = select_columns(block.columns.scores.cpu(), none, block.shape.num_important, 0.0)
    block.important_columns.copy_(chosen.nonzero().squeeze(1) + block.shape.first)
    block.deferred_columns.copy_((~chosen).nonzero().squeeze(1) + block.shape.first)


def adamw_state(
    engine: Engine,
    places: Mapping[Tensor, SplitParam | Resident],
    param_groups: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Return copies of a drained engine's moments as a state of torch's AdamW, on the CPU.

    Where ranks have some rows each, the moments are DTensors.
    """
    numbers = count()
    state, groups = {}, []
    torchs = torch.optim.AdamW([torch.zeros(0)]).param_groups[0]
    for group in param_groups:
        keys = [next(numbers) for _ in group["params"]]
        settings = {
            key: value for key, value in group.items() if key in torchs or key == "initial_lr"
        }
        groups.append({**torchs, **settings, "params": keys})
        for key, param in zip(keys, group["params"], strict=True):
            place = places.get(param)
            steps = 0 if place is None else _num_steps(place)
            if place is not None and steps:
                rows = place.part.spread if isinstance(place, SplitParam) else RowSpread.of(param)
                beta2 = float(group["betas"][1])
                moments = {
                    name: spread(own, rows, 0)
                    for name, own in _moments(place, 1.0 - beta2**steps).items()
                }
                state[key] = {
                    "step": torch.tensor(float(steps), dtype=torch.float32, device="cpu"),
                    **moments,
                }
    return {"state": state, "param_groups": groups}


def _num_steps(place: SplitParam | Resident) -> int:
    return int(place.step) if isinstance(place, Resident) else place.num_steps


def _moments(place: SplitParam | Resident, correction: float) -> dict[str, Tensor]:
    """Return copies of a parameter's moments in this rank's rows of it, float32, by their names.

    Args:
        place: The parameter.
        correction: 1 - beta2^t, by which a second moment falls short of a mean of squares.
    """
    if isinstance(place, Resident):
        return {name: place.state()[name].to("cpu", copy=True) for name in _MOMENTS}
    if place.bank.has_second:
        return {name: _moment(place, name) for name in _MOMENTS}
    roots_OI = place.part.of(_roots(place, correction)).cpu()
    quotients = _moment(place, "exp_avg")
    of_param = roots_OI.contiguous().view(quotients.shape)
    return {
        "exp_avg": quotients * of_param,
        "exp_avg_sq": of_param.square() * correction,
    }


def _roots(split: SplitParam, correction: float) -> Tensor:
    """Return roots of factored second moments, (O, I) float32, of which none is 0.

    The formula is that of `zenflow.step.fresh.steps`; eps is so small that it is left out.
    """
    columns, rows = split.columns.mean_squares, split.rows.mean_squares
    mean = columns.mean().clamp_min(LEAST_ROOT**2)
    squares_OI = (rows / mean).unsqueeze(1) * columns / max(correction, 1e-12)
    return squares_OI.sqrt_().clamp_min_(LEAST_ROOT)


def _moment(place: SplitParam, name: str) -> Tensor:
    """Return one of a parameter's moments in this rank's rows of it, float32."""
    shape = (place.num_columns, place.num_host_rows)
    moments_IO = torch.empty(shape, dtype=torch.float32, device="cpu")
    bank_rows = slice(place.bank_first, place.bank_last)
    moments_IO[place.deferred_columns.cpu()] = place.host.moment(name)
    of_bank = place.part.of(getattr(place.bank, name)[bank_rows], 1)
    moments_IO[place.important_columns.cpu()] = of_bank.cpu()
    return moments_IO.t().contiguous().view(place.num_host_rows, *place.param.shape[1:])
