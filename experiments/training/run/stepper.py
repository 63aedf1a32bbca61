"""One step of a run: gradients of its micro-batches, the update, and the next learning rate."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from experiments.training.parts.files.checkpoint import Checkpoint
from experiments.training.parts.files.run_state import load_run
from experiments.training.parts.ranks.model import ForwardModel
from experiments.training.parts.setup import RunSetup, make_optimizer, make_schedule
from experiments.training.run.evaluation import loss_of
from experiments.training.run.saved.random_state import (
    Generators,
    generators,
    random_state,
    set_random_state,
)
from zenflow.controller import AbstractController


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTaken:
    """Part of a step's row on the step itself."""

    loss: Tensor
    """Mean over the micro-batches, on the device."""
    rate: float
    """Learning rate of the step."""
    num_tokens: int
    skipped: bool
    """Whether the loss scale overflowed, so that no weight has changed."""
    seconds: float


class Stepper:
    """Optimizer, learning rate and loss scale of a run, which take its steps."""

    def __init__(
        self, setup: RunSetup, controller: AbstractController | None, rising: int
    ) -> None:
        """Make the optimizer.

        Args:
            setup: The run.
            controller: Changes the knobs while the run goes on.
            rising: Steps over which the learning rate rises.
        """
        settings = setup.settings
        self._setup = setup
        self.optimizer = make_optimizer(setup, controller)
        self.schedule = make_schedule(self.optimizer, settings, setup.total_steps, rising)
        self._forward_model = ForwardModel(setup.model, setup.ranks, self.optimizer)
        scaling: dict[str, Any] = dict(settings.grad_scaler)
        half = settings.dtype == "float16"
        self._scaler = torch.amp.GradScaler(setup.device.type, enabled=half, **scaling)
        self._drawn: Generators | None = None
        # Dropout, where a model has it: each rank's own.
        torch.manual_seed(settings.seed + setup.ranks.rank)

    def take(self, done: int) -> StepTaken:
        """Take the step that follows ``done`` steps."""
        self._drawn = generators()  # to be saved should this step fail
        settings, device = self._setup.settings, self._setup.device
        started = time.perf_counter()
        loss = torch.zeros((), device=device)
        num_tokens = 0
        for micro in range(settings.grad_accum):
            batch = self._setup.data.train.batch(done * settings.grad_accum + micro).to(device)
            with self._forward_model.pass_of(is_last=micro == settings.grad_accum - 1):
                with self.optimizer.span("forward"):
                    part = loss_of(self._setup, batch, self._forward_model.module)
                    part = part / settings.grad_accum
                with self.optimizer.span("backward"):
                    self._scaler.scale(part).backward()
            loss += part.detach()
            num_tokens += batch.num_tokens
        rate = self.optimizer.param_groups[0]["lr"]
        taken = self._update()
        if taken:
            self.schedule.step()
        self._drawn = None
        seconds = time.perf_counter() - started
        return StepTaken(
            loss=loss, rate=rate, num_tokens=num_tokens, skipped=not taken, seconds=seconds
        )

    def _update(self) -> bool:
        """Step, which unscales and clips; False if the loss scale overflowed."""
        scale = self._scaler.get_scale()
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.optimizer.zero_grad()  # a step that overflowed has left its gradients behind
        return self._scaler.get_scale() >= scale

    def state(self) -> dict[str, Any]:
        """Return the state that a checkpoint has beside the weights and the optimizer's."""
        return {
            "schedule": self.schedule.state_dict(),
            "scaler": self._scaler.state_dict(),
            "random": self._setup.ranks.collect(random_state(self._drawn or generators())),
        }

    def restore(self, checkpoint: Checkpoint) -> None:
        """Take up weights, optimizer and ``state`` of a checkpoint."""
        ranks, state = self._setup.ranks, checkpoint.state
        load_run(checkpoint, self._setup.model, self.optimizer, ranks)
        self.schedule.load_state_dict(state["schedule"])
        self._scaler.load_state_dict(state["scaler"])
        if len(state["random"]) == ranks.count:  # others draw from where they begin
            set_random_state(state["random"][ranks.rank])
