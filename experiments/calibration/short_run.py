"""A short run: a few optimizer steps of a model, without a run's files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from experiments.training.parts.ranks.model import ForwardModel
from experiments.training.parts.ranks.ranks import ALONE, Ranks
from experiments.training.parts.setup import RunSetup, build_setup, make_optimizer
from experiments.training.run.evaluation import loss_of
from experiments.training.settings.training import TrainSettings
from zenflow.controller import AbstractController
from zenflow.optimizer import ZenFlowAdamW
from zenflow.report import StepReport


class ShortRun:
    """A model, its data and its optimizer, ready to take steps.

    Attributes:
        setup: What is trained on what.
        optimizer: The engine.
    """

    def __init__(
        self,
        settings: TrainSettings,
        controller: AbstractController | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """Build everything; who makes one ends the optimizer's threads."""
        self.setup: RunSetup = build_setup(settings, ranks=ranks)
        self.optimizer: ZenFlowAdamW = make_optimizer(self.setup, controller)
        self._model = ForwardModel(self.setup.model, ranks, self.optimizer)
        self._taken = 0

    def step(self) -> None:
        """Take one step, without loss scaling, schedule or log: it is timed, not learnt from."""
        settings, optimizer = self.setup.settings, self.optimizer
        for micro in range(settings.grad_accum):
            batch = self.setup.data.train.batch(self._taken * settings.grad_accum + micro)
            batch = batch.to(self.setup.device)
            with self._model.pass_of(is_last=micro == settings.grad_accum - 1):
                with optimizer.span("forward"):
                    loss = loss_of(self.setup, batch, self._model.module)
                    loss = loss / settings.grad_accum
                with optimizer.span("backward"):
                    loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        self._taken += 1

    def reports(self, count: int) -> list[StepReport]:
        """Take steps and return their reports."""
        found = []
        for _ in range(count):
            self.step()
            report = self.optimizer.report
            assert report is not None
            found.append(report)
        return found


@contextmanager
def short_run(
    settings: TrainSettings,
    controller: AbstractController | None = None,
    ranks: Ranks = ALONE,
) -> Iterator[ShortRun]:
    """Yield a short run and end its threads, whatever happened.

    Args:
        settings: What it does.
        controller: Changes its knobs.
        ranks: Processes that share it, in the way that the settings say.
    """
    run = ShortRun(settings, controller, ranks)
    try:
        yield run
    finally:
        run.optimizer.close()
