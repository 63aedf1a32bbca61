"""What a resumed run must share with the run that wrote the checkpoint."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from experiments.build import Workbench
from experiments.checkpoint import Checkpoint
from zenflow.errors import CheckpointError

FREE_TO_CHANGE = frozenset(
    {
        "steps", "epochs", "device", "link", "host_threads", "device_threads", "save_every",
        "eval_every", "eval_batches", "timeline_steps", "gradients",
    }
)  # fmt: skip
"""Settings on which the weights don't depend (steps do under a schedule: see below)."""


def check_same_run(bench: Workbench, checkpoint: Checkpoint) -> None:
    """Raise ``CheckpointError``, saying what differs, unless the run can go on exactly."""
    saved, asked = checkpoint.state["settings"], bench.settings.to_dict()
    differences = [
        f"{name} was {saved.get(name)!r}, now {value!r}"
        for name, value in asked.items()
        if name not in FREE_TO_CHANGE and _comparable(saved.get(name)) != _comparable(value)
    ]
    total = checkpoint.state["total_steps"]
    if asked["schedule"] != "constant" and total != bench.total_steps:
        differences.append(
            f"steps was {total}, now {bench.total_steps}, which the {asked['schedule']} schedule "
            "depends on"
        )
    differences += _model_differences(checkpoint.state["model"], bench.model.state_dict())
    if differences:
        raise CheckpointError(
            f"{checkpoint.path} can be resumed only by the run that wrote it, but:\n"
            + "".join(f"- {difference}\n" for difference in differences[:12])
            + "Leave these settings out (a resumed run takes its own from config.json), or start "
            "a new run with another --out."
        )
    if checkpoint.step > bench.total_steps:
        raise CheckpointError(
            f"{checkpoint.path} is at step {checkpoint.step}, past the {bench.total_steps} steps "
            "asked for: raise --steps"
        )


def random_state() -> dict[str, Any]:
    """Return the state of every global generator a model or data set may draw from."""
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(internal), gauss],
        "numpy": [kind, [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
        "cuda": [],
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Take up what ``random_state`` returned."""
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    # A checkpoint of a machine with other GPUs: torch's own generator above is what matters.
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def _comparable(value: Any) -> Any:
    return list(value) if isinstance(value, tuple | list) else value


def _model_differences(
    saved: Mapping[str, torch.Tensor], present: Mapping[str, torch.Tensor]
) -> list[str]:
    """Return which tensors are missing, too many, or of another shape or dtype."""
    differences = [f"the model has no tensor {name}" for name in saved if name not in present]
    for name, tensor in present.items():
        if name not in saved:
            differences.append(f"the checkpoint has no tensor {name}")
        elif saved[name].shape != tensor.shape or saved[name].dtype != tensor.dtype:
            differences.append(
                f"{name} was {saved[name].dtype} {tuple(saved[name].shape)}, "
                f"now {tensor.dtype} {tuple(tensor.shape)}"
            )
    return differences
