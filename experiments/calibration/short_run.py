"""A short run: a few optimizer steps of a model, timed part by part, without a run's files."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from experiments.build import Workbench, build_workbench, make_optimizer
from experiments.recipes import TrainSettings
from experiments.training import cross_entropy, forward
from zenflow.optimizer import ZenFlowAdamW


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds of one step, by the training thread's clock; on a GPU behind a synchronisation."""

    forward: float
    backward: float
    update: float
    """``optimizer.step()``."""
    total: float


class ShortRun:
    """A model, its data and its optimizer, ready to take steps.

    Attributes:
        bench: What is trained on what.
        optimizer: The engine.
    """

    def __init__(self, settings: TrainSettings) -> None:
        """Build everything; `close` ends the optimizer's threads."""
        self.bench: Workbench = build_workbench(settings)
        self.optimizer: ZenFlowAdamW = make_optimizer(self.bench)
        self._taken = 0

    def step(self, *, drains: bool = False) -> StepTimes:
        """Take one step.

        Args:
            drains: Whether to wait for all copies and host tasks afterwards, outside the times:
                each part then runs by itself.
        """
        settings, optimizer = self.bench.settings, self.optimizer
        started = self._now()
        times = [0.0, 0.0]
        for micro in range(settings.grad_accum):
            batch = self.bench.data.train.batch(self._taken * settings.grad_accum + micro)
            batch = batch.to(self.bench.device)
            before = self._now()
            with optimizer.span("forward"):
                loss = cross_entropy(forward(self.bench.model, batch), batch)
                loss = loss / settings.grad_accum
            between = self._now()
            with optimizer.span("backward"):
                loss.backward()
            times[0] += between - before
            times[1] += self._now() - between
        before = self._now()
        if settings.gradients == "keep" and settings.max_grad_norm is not None:
            optimizer.clip_grad_norm_(settings.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        ended = self._now()
        self._taken += 1
        if drains:
            optimizer.synchronize()
        return StepTimes(
            forward=times[0], backward=times[1], update=ended - before, total=ended - started
        )

    def _now(self) -> float:
        return time.perf_counter()

    def close(self) -> None:
        """End the optimizer's threads."""
        self.optimizer.close()


@contextmanager
def short_run(settings: TrainSettings) -> Iterator[ShortRun]:
    """Yield a short run and end its threads, whatever happened."""
    run = ShortRun(settings)
    try:
        yield run
    finally:
        run.close()
