"""The training loop: steps, evaluations and saves of one run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.online.tuning import Tuning
from experiments.output.progress import Reporter
from experiments.output.run_types import Evaluation, RunSummary
from experiments.training.parts.files.checkpoint import CHECKPOINTS, Checkpoint
from experiments.training.parts.files.run_state import save_run
from experiments.training.parts.models.pretrained import save_model_folder
from experiments.training.parts.ranks.model import forget_gathered, whole_weights
from experiments.training.parts.setup import RunSetup
from experiments.training.run.agreement import Agreement
from experiments.training.run.evaluation import evaluate
from experiments.training.run.saved.pace import SavePace
from experiments.training.run.saved.resume import change_rate, changes, told
from experiments.training.run.saved.saving import (
    Troubles,
    how_to_go_on,
    save_or_warn,
    saving_first,
)
from experiments.training.run.step_rows import StepRows
from experiments.training.run.stepper import Stepper
from experiments.training.run.stop import StopRequest
from experiments.training.run.summary import described, over_ranks, summarize, write_results
from experiments.training.run.tuned.tuning import tell_decisions
from experiments.training.settings.rates import warmup_steps
from zenflow.errors import CheckpointError
from zenflow.report import MemoryPlan

MODEL = "model"
"""Folder of the exported weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended."""

    summary: RunSummary
    steps: int
    """Steps taken, those before a resume included."""
    stopped: bool
    """Whether a signal ended it before its last step."""


class Training:
    """A run in progress."""

    def __init__(
        self,
        setup: RunSetup,
        folder: Path,
        reporter: Reporter,
        checkpoint: Checkpoint | None,
        tuning: Tuning | None,
    ) -> None:
        """Make the optimizer and schedule, and take up a checkpoint's state if there is one."""
        self.setup = setup
        self.folder = folder
        self.reporter = reporter
        self.tuning = tuning
        self.ranks = setup.ranks
        self.rising = (
            warmup_steps(setup.settings, setup.total_steps)
            if checkpoint is None
            else checkpoint.state["warmup_steps"]
        )
        """Steps over which the learning rate rises; a run that is made longer keeps them."""
        self.stepper = Stepper(setup, None if tuning is None else tuning.controller, self.rising)
        self.optimizer = self.stepper.optimizer
        self.step = 0
        self.saved_step: int | None = None
        """Steps of the newest checkpoint; None if there is none."""
        self._save_seconds = 0.0
        """Seconds of saves since the step before."""
        self.changes: list[dict[str, Any]] = []
        """Changes at a resume of settings that the weights depend on."""
        if checkpoint is not None:
            self._restore(checkpoint)
        self.rows = StepRows(
            folder / "steps.jsonl", self.step, reporter, self.optimizer.report, self.ranks
        )

    def close(self) -> None:
        """End the optimizer's threads and close the log."""
        self.rows.close()
        self.optimizer.close()
        if self.setup.stream is not None:
            self.setup.stream.close()

    def run(self, stop: StopRequest) -> Outcome:
        """Take the remaining steps and write the run's files.

        Raises:
            CheckpointError: Something could not be written at the end.
            NormError: A gradient norm was not finite; the message is for a user of the command.
        """
        self.reporter.start(self.setup.settings.label, self.step, self.setup.total_steps)
        tell_decisions(self.tuning, self.optimizer, self.reporter)
        with saving_first(self):
            self._train(stop)
            summary, troubles = self._finish()
        if troubles:
            raise CheckpointError(
                f"the run in {self.folder} ended after step {self.step}, but could not write:\n"
                + f"{troubles}\n"
                + f"Mend that, then go on. {how_to_go_on(self)}"
            )
        return Outcome(
            summary=summary, steps=self.step, stopped=self.step < self.setup.total_steps
        )

    def _train(self, stop: StopRequest) -> None:
        """Take steps until there are no more, or a signal has come."""
        settings = self.setup.settings
        pace = SavePace.of(settings)
        agreed = Agreement(self.ranks, stop, pace)
        while not self._is_done and not agreed.stops:
            self._step()
            agreed.ask()
            if self._is_evaluation_due() and not self._is_done:  # the end evaluates anyway
                self._evaluate_row()
            if agreed.saves(self.step) and not self._is_done:  # the end saves anyway
                save_or_warn(self, pace)
        agreed.end()
        self.optimizer.synchronize()

    def _finish(self) -> tuple[RunSummary, Troubles]:
        """Write the run's files, the checkpoint first; return summary and what went wrong."""
        timelines = self.ranks.collect(self.optimizer.timeline)
        evaluation: Evaluation = {}
        if self._is_done and self._is_evaluation_due():  # while its row is not yet written
            evaluation = self._evaluate_row()
        self.rows.flush(self.optimizer.report)
        troubles = Troubles()

        with troubles.noted():
            if self.setup.settings.checkpoint:
                self.save()
            else:
                self.ranks.together(self.rows.sync)
        if self._is_done:
            evaluation = evaluation or self.evaluate()
            with troubles.noted():
                self.export()
        self.reporter.finish()
        memory, summary = self.memory(), None
        if self.ranks.is_first:  # the rows are its
            summary = summarize(
                self.setup, self.optimizer, memory, self.folder, evaluation, tuning=self.tuning
            )
        summary = self.ranks.of_first(summary)
        assert summary is not None
        if not self.ranks.is_first:
            return summary, troubles
        with troubles.noted():
            if self.tuning is not None and self._is_done:
                self.tuning.end(self.step, summary["run_seconds"])
            traced = [described(timeline, self.setup, summary) for timeline in timelines]
            tuning = self.tuning if self._is_done else None
            missed = write_results(self.folder, summary, traced, tuning)
            if missed is not None:
                self.reporter.say(missed)
        return summary, troubles

    def memory(self) -> MemoryPlan:
        """Return the memory of all ranks' optimizers together; all of them call it."""
        return over_ranks(self.ranks.collect(self.optimizer.memory), self.ranks.parallel)

    def evaluate(self) -> Evaluation:
        """Return loss (and accuracy) on held-out batches, with the true weights."""
        with self.true_weights():
            return evaluate(self.setup)

    def _evaluate_row(self) -> Evaluation:
        """Evaluate, put the result into the last step's row, and show it."""
        result = self.evaluate()
        self.rows.add_evaluation(result)
        self.reporter.evaluated(self.step, result)
        return result

    def export(self) -> None:
        """Write the true weights as a folder that ``--model`` loads."""
        setup = self.setup
        with self.true_weights():
            state = whole_weights(setup.model, self.ranks) if self.ranks.are_several else None
            if self.ranks.is_first:
                save_model_folder(setup.model, setup.tokenizer, self.folder / MODEL, state)

    @contextmanager
    def true_weights(self) -> Iterator[None]:
        """Evaluate and export the weights as the optimizer knows them, without prediction."""
        self.optimizer.eval()
        self.setup.model.eval()
        try:
            yield
        finally:
            self.setup.model.train()
            forget_gathered(self.setup.model)
            self.optimizer.train()

    @property
    def _is_done(self) -> bool:
        return self.step == self.setup.total_steps

    def _is_evaluation_due(self) -> bool:
        """Return whether an evaluation was asked for after this step."""
        every = self.setup.settings.eval_every
        return bool(every) and self.step % every == 0

    def save(self, *, keep_others: bool = False) -> None:
        """Write a checkpoint of everything the rest of the run depends on, if there is none yet.

        Args:
            keep_others: Whether earlier ones stay.

        Raises:
            CheckpointError: It can't be written; an earlier one is still whole.
            NormError: The weights may hold a gradient that is not finite.
        """
        self.optimizer.synchronize()
        if self.saved_step == self.step:
            return
        started = time.perf_counter()
        with self.optimizer.span("save"):
            self._save(keep_others=keep_others)
        self._save_seconds += time.perf_counter() - started

    def _save(self, *, keep_others: bool) -> None:
        self.rows.flush(self.optimizer.report)  # else a resumed log would lack the last row
        lines = self.ranks.together(self._sync_logs)
        state = {
            "decision_lines": lines,
            "settings": self.setup.settings.to_dict(),
            "total_steps": self.setup.total_steps,
            "warmup_steps": self.rising,
            "changes": self.changes,
            "data": self.setup.fingerprint,
            **self.stepper.state(),
        }
        try:
            save_run(
                self.folder / CHECKPOINTS,
                self.step,
                state,
                self.setup.model,
                self.optimizer,
                self.ranks,
                keep_others=keep_others,
            )
        except CheckpointError:
            self.optimizer.forget_checkpoint()  # the run may go on, and end before the next one
            raise
        self.saved_step = self.step

    def _sync_logs(self) -> int | None:
        """Have the logs on the disk, and return how many lines of decisions there are."""
        self.rows.sync()
        return None if self.tuning is None else self.tuning.saved_lines(self.optimizer, self.step)

    def _step(self) -> None:
        """Take one optimizer step and leave its row with the log."""
        taken = self.stepper.take(self.step)
        self.step += 1
        row = {"step": self.step, "loss": taken.loss, "lr": taken.rate}
        row |= {"tokens": taken.num_tokens, "skipped": taken.skipped}
        if self._save_seconds:
            row["save_seconds"] = self._save_seconds
            self._save_seconds = 0.0
        self.rows.add(row | {"seconds": taken.seconds}, self.optimizer.report)
        tell_decisions(self.tuning, self.optimizer, self.reporter)

    def _restore(self, checkpoint: Checkpoint) -> None:
        self.stepper.restore(checkpoint)
        self.step = self.saved_step = checkpoint.step
        found = changes(self.setup, checkpoint)
        self.changes = [*checkpoint.state["changes"], *found]
        if found:
            change_rate(self.optimizer, self.stepper.schedule, self.setup.settings.lr)
            for line in told(found, self.setup, self.optimizer, self.rising):
                self.reporter.say(line)
