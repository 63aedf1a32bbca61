"""Settings that a resumed run must share with the run that wrote the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from experiments.training.parts.data.fingerprint import shown
from experiments.training.parts.files.checkpoint import Checkpoint
from experiments.training.parts.setup import RunSetup
from experiments.training.settings.rates import end_of_fall, warmup_steps
from experiments.training.settings.training import PACES, TrainSettings
from zenflow.errors import CheckpointError

FREE_TO_CHANGE = frozenset(
    {
        "steps", "epochs", "device", "link", "host_threads", "device_threads", "checkpoint",
        "save_every", "save_minutes", "eval_every", "eval_batches", "timeline_steps", "gradients",
        "parallel", "bind_cores", "memory_check", "stream", "resident_layers",
        "offload_sums", "offload_activations", "state_dir", "drive_tbw",
    }
)  # fmt: skip
"""Settings on which the weights don't depend (steps do under a schedule: see ``changes``).

Under compact host state they depend on `PACES`."""

CHANGEABLE = ("lr", "max_grad_norm")
"""Settings that a resumed run may change from its next step on, and notes."""


def check_same_run(setup: RunSetup, checkpoint: Checkpoint) -> None:
    """Raise ``CheckpointError``, saying what differs, unless the run can go on exactly."""
    # An earlier version knew fewer settings.
    saved = {**TrainSettings().to_dict(), **checkpoint.state["settings"]}
    asked = setup.settings.to_dict()
    before, now = checkpoint.state["data"], setup.fingerprint
    allowed = {*FREE_TO_CHANGE, *CHANGEABLE}
    if setup.settings.is_compact:
        allowed -= PACES
    if before is not None and before == now:
        allowed |= {"data"}  # the same texts in another place
    differences = [
        f"{name} was {saved[name]!r}, now {value!r}"
        for name, value in asked.items()
        if name not in allowed and _comparable(saved[name]) != _comparable(value)
    ]
    differences += _model_differences(_shapes(checkpoint.state), setup.model.state_dict())
    if differences:
        raise CheckpointError(
            f"{checkpoint.path} is not of the run that is to go on:\n"
            + "".join(f"- {difference}\n" for difference in differences[:12])
            + "Leave these settings out (a resumed run takes its own from config.json), or start "
            "a new run with another --out."
        )
    if before != now and before is not None and now is not None:
        raise CheckpointError(
            f"a run goes on with the data that it began with, but {setup.data.name} "
            f"has changed since: it was {shown(before)}, and is {shown(now)}. Restore it, or give "
            "a copy of what it was with --data; or start a new run on the new data, from these "
            "weights if you like (--model takes a run's model/ folder)"
        )
    if checkpoint.step > setup.total_steps:
        raise CheckpointError(
            f"{checkpoint.path} is at step {checkpoint.step}, past the {setup.total_steps} steps "
            "asked for: raise --steps"
        )
    is_tuned = setup.settings.controller is not None or setup.settings.replay is not None
    if is_tuned and changes(setup, checkpoint):
        raise CheckpointError(
            "a tuned run keeps its steps, learning rate and clipping when it goes on, so that its "
            f"decisions.jsonl repeats it: leave out {_flags(changes(setup, checkpoint))}, or "
            "start a new run from its model/ folder"
        )


def changes(setup: RunSetup, checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Return the settings that weights depend on and that a resumed run changes from here on."""
    saved, asked = checkpoint.state["settings"], setup.settings.to_dict()
    pairs = {name: (saved[name], asked[name]) for name in CHANGEABLE}
    lengths = checkpoint.state["total_steps"], setup.total_steps
    before, now = (end_of_fall(setup.settings, length) for length in lengths)
    if before != now:
        pairs["steps"] = lengths
    return [
        {"after_step": checkpoint.step, "name": name, "old": old, "new": new}
        for name, (old, new) in pairs.items()
        if old != new
    ]


def with_rise(setup: RunSetup, checkpoint: Checkpoint) -> RunSetup:
    """Return the run with a warm-up that lasts as long in its steps as it did when it began."""
    share = min(1.0, checkpoint.state["warmup_steps"] / setup.total_steps)
    if warmup_steps(setup.settings, setup.total_steps) == checkpoint.state["warmup_steps"]:
        return setup
    return replace(setup, settings=replace(setup.settings, warmup=share))


def change_rate(optimizer: Optimizer, schedule: LambdaLR, rate: float) -> None:
    """Let a schedule that was taken up from a checkpoint go on as it is now planned."""
    schedule.base_lrs = [rate for _ in optimizer.param_groups]
    for group, factor in zip(optimizer.param_groups, schedule.lr_lambdas, strict=True):
        group["initial_lr"] = rate
        group["lr"] = rate * factor(schedule.last_epoch)


def told(
    found: Sequence[Mapping[str, Any]], setup: RunSetup, optimizer: Optimizer, rising: int
) -> list[str]:
    """Return changes in words, and what the learning rate does from here on."""
    lines = [
        f"Changed after step {change['after_step']}: {change['name']} was {change['old']}, and is "
        f"{change['new']} from here on."
        for change in found
    ]
    rate, kind = optimizer.param_groups[0]["lr"], setup.settings.schedule
    end = end_of_fall(setup.settings, setup.total_steps)
    fall = "stays" if end is None else f"falls ({kind}) until step {end}"
    lines.append(
        f"The learning rate is {rate:.3g} at the next step: it is that of a run that rises to "
        f"{setup.settings.lr:g} over {rising} steps and then {fall}."
    )
    return lines


def _flags(found: Sequence[Mapping[str, Any]]) -> str:
    return " and ".join(f"--{change['name'].replace('_', '-')}" for change in found)


def _comparable(value: Any) -> Any:
    return list(value) if isinstance(value, tuple | list) else value


def _shapes(state: Mapping[str, Any]) -> dict[str, tuple[str, list[int]]]:
    """Return dtype and shape of the tensors of the model that was saved."""
    there = {name: (str(own.dtype), list(own.shape)) for name, own in state["model"].items()}
    left_out = state.get("model_left_out", {}).items()
    return there | {name: (dtype, list(shape)) for name, (dtype, shape) in left_out}


def _model_differences(
    saved: Mapping[str, tuple[str, list[int]]], present: Mapping[str, torch.Tensor]
) -> list[str]:
    """Return which tensors are missing, too many, or of another shape or dtype."""
    differences = [f"the model has no tensor {name}" for name in saved if name not in present]
    for name, tensor in present.items():
        if name not in saved:
            differences.append(f"the checkpoint has no tensor {name}")
        elif saved[name] != (str(tensor.dtype), list(tensor.shape)):
            dtype, shape = saved[name]
            differences.append(
                f"{name} was {dtype} {tuple(shape)}, now {tensor.dtype} {tuple(tensor.shape)}"
            )
    return differences
