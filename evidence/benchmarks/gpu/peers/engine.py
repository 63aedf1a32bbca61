"""An engine as the benchmark drives it: an optimizer around a model."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from evidence.benchmarks.gpu.setup import Bench
from evidence.benchmarks.gpu.training import CLIP_NORM

_STATE = "state.pt"


class Engine:
    """An optimizer around a model, with the clipping and checkpoints of a plain torch one.

    Attributes:
        model: Module, or function, that takes tokens and returns an object with logits.
        optimizer: Optimizer with torch's methods.
        window: Steps after which its work repeats.
    """

    def __init__(self, model: Any, optimizer: Any, window: int = 1) -> None:
        """Drive an optimizer that has the model's parameters."""
        self.model, self.optimizer, self.window = model, optimizer, window

    def backward(self, loss: Tensor) -> None:
        """Compute gradients."""
        loss.backward()

    def step(self) -> None:
        """Clip, take a step, and drop gradients."""
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def traffic(self) -> tuple[int, int] | None:
        """Return bytes to the host and from it in the last finished step; None if untold."""
        return None

    def weights(self) -> list[Tensor]:
        """Return copies of all weights on the host, of the greatest precision it has them in."""
        return copies(self.model.parameters())

    def save(self, folder: Path) -> None:
        """Write a checkpoint of model and optimizer."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(state, folder / _STATE)

    def load(self, folder: Path) -> None:
        """Take up a checkpoint."""
        # Its own file of a moment ago, with whatever classes the optimizer keeps there.
        state = torch.load(folder / _STATE, map_location="cpu", weights_only=False)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def close(self) -> None:
        """Wait for what is under way, and give up what is not memory."""


def copies(tensors: Any) -> list[Tensor]:
    """Return copies on the host of tensors, or of the local parts of sharded ones."""
    return [
        getattr(each, "to_local", lambda each=each: each)().detach().to("cpu", copy=True)
        for each in tensors
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """An engine that can be measured."""

    make: Callable[[nn.Module, Bench], Engine]
    """Function that puts it around a model."""
    state: str
    """Words for dtype and place of its state, and what it can't do."""
    package: str = "torch"
    """Package that it is in."""
    needs_gpu: bool = False
    """Whether it refuses to run on a CPU."""

    def version(self) -> str:
        """Return its package with the installed version."""
        try:
            return f"{self.package} {importlib.metadata.version(self.package)}"
        except importlib.metadata.PackageNotFoundError:  # ours, in its clone
            return self.package
