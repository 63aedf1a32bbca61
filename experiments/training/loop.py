"""The training loop: steps, evaluations and saves of one run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from experiments.output.progress import Reporter
from experiments.output.run_types import Evaluation, RunSummary
from experiments.training.evaluation import cross_entropy, evaluate, forward
from experiments.training.log.step_rows import StepRows
from experiments.training.log.summary import described, summarize, write_results
from experiments.training.models.pretrained import save_model_folder
from experiments.training.preparation.setup import RunSetup, make_optimizer, make_schedule
from experiments.training.rates import warmup_steps
from experiments.training.saved.checkpoint import CHECKPOINTS, Checkpoint, save_checkpoint
from experiments.training.saved.resume import (
    Generators,
    change_rate,
    changes,
    generators,
    random_state,
    set_random_state,
    told,
)
from experiments.training.saved.saving import SavePace, how_to_go_on, save_or_warn, saving_first
from experiments.training.stop import StopRequest
from experiments.training.tuned.run import Tuning
from zenflow.errors import CheckpointError

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
        self.optimizer = make_optimizer(setup, None if tuning is None else tuning.controller)
        self.rising = warmup_steps(setup.settings, setup.total_steps)
        """Steps over which the learning rate rises; a run that is made longer keeps them."""
        if checkpoint is not None:
            self.rising = checkpoint.state["warmup_steps"]
        self.schedule = make_schedule(
            self.optimizer, setup.settings, setup.total_steps, self.rising
        )
        scaling: dict[str, Any] = dict(setup.settings.grad_scaler)
        half = setup.settings.dtype == "float16"
        self.scaler = torch.amp.GradScaler(setup.device.type, enabled=half, **scaling)
        self.step = 0
        self.saved_step: int | None = None
        """Steps of the newest checkpoint; None if there is none."""
        self.changes: list[dict[str, Any]] = []
        """What was changed when the run was resumed, of what its weights depend on."""
        self._drawn: Generators | None = None
        torch.manual_seed(setup.settings.seed)  # dropout, where a model has it
        if checkpoint is not None:
            self._restore(checkpoint)
        self.rows = StepRows(folder / "steps.jsonl", self.step, reporter, self.optimizer.report)

    def close(self) -> None:
        """End the optimizer's threads and close the log."""
        self.rows.close()
        self.optimizer.close()

    def run(self, stop: StopRequest) -> Outcome:
        """Take the remaining steps and write the run's files.

        Raises:
            CheckpointError: Something could not be written at the end.
            NormError: A gradient norm was not finite; the message is for a user of the command.
        """
        self.reporter.start(self.setup.settings.label, self.step, self.setup.total_steps)
        self._tell_decisions()
        with saving_first(self):
            self._train(stop)
            summary, troubles = self._finish()
        if troubles:
            raise CheckpointError(
                f"the run in {self.folder} ended after step {self.step}, but could not write:\n"
                + "".join(f"- {trouble}\n" for trouble in troubles)
                + f"Mend that, then go on. {how_to_go_on(self)}"
            )
        return Outcome(
            summary=summary, steps=self.step, stopped=self.step < self.setup.total_steps
        )

    def _train(self, stop: StopRequest) -> None:
        """Take steps until there are no more, or a signal has come."""
        settings = self.setup.settings
        pace = SavePace(settings.save_every, settings.save_minutes)
        while not self._is_done and not stop.requested:
            self._step()
            if self._is_evaluation_due():
                self.rows.add_evaluation(self.evaluate())
            if pace.is_due(self.step) and not self._is_done:  # the end saves anyway
                save_or_warn(self, pace)
        self.optimizer.synchronize()

    def _finish(self) -> tuple[RunSummary, list[str]]:
        """Write the run's files, the checkpoint first; return summary and what went wrong."""
        self.rows.flush(self.optimizer.report)
        timeline = self.optimizer.timeline
        evaluation: Evaluation = {}
        troubles: list[str] = []

        @contextmanager
        def noting() -> Iterator[None]:
            try:
                yield
            except (CheckpointError, OSError, SafetensorError) as error:
                troubles.append(str(error))

        with noting():
            self.save()
        if self._is_done:
            evaluation = self.evaluate()
            with noting():
                self.export()
        self.reporter.finish()
        summary = summarize(
            self.setup, self.optimizer, self.folder, evaluation, tuning=self.tuning
        )
        with noting():
            if self.tuning is not None and self._is_done:
                self.tuning.end(self.step, summary["run_seconds"])
            traced = described(timeline, self.setup, summary)
            tuning = self.tuning if self._is_done else None
            missed = write_results(self.folder, summary, traced, tuning)
            if missed is not None:
                self.reporter.say(missed)
        return summary, troubles

    def evaluate(self) -> Evaluation:
        """Return loss (and accuracy) on held-out batches, with the true weights."""
        with self.true_weights():
            return evaluate(self.setup)

    def export(self) -> None:
        """Write the true weights as a folder that ``--model`` loads."""
        with self.true_weights():
            save_model_folder(self.setup.model, self.setup.tokenizer, self.folder / MODEL)

    @contextmanager
    def true_weights(self) -> Iterator[None]:
        """Evaluate and export the weights as the optimizer knows them, without prediction."""
        self.optimizer.eval()
        self.setup.model.eval()
        try:
            yield
        finally:
            self.setup.model.train()
            self.optimizer.train()

    @property
    def _is_done(self) -> bool:
        return self.step == self.setup.total_steps

    def _is_evaluation_due(self) -> bool:
        """Return whether to evaluate now; not among the last steps, whose spans are recorded."""
        settings = self.setup.settings
        if not settings.eval_every or self.step % settings.eval_every:
            return False
        return self.step <= self.setup.total_steps - settings.timeline_steps

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
        self.rows.flush(self.optimizer.report)  # else a resumed log would lack the last row
        self.rows.sync()
        lines = None if self.tuning is None else self.tuning.saved_lines(self.optimizer)
        save_checkpoint(
            self.folder / CHECKPOINTS,
            self.step,
            {
                "decision_lines": lines,
                "settings": self.setup.settings.to_dict(),
                "total_steps": self.setup.total_steps,
                "warmup_steps": self.rising,
                "changes": self.changes,
                "data": self.setup.fingerprint,
                "model": dict(self.setup.model.state_dict()),
                "optimizer": self.optimizer.state_dict(),
                "schedule": self.schedule.state_dict(),
                "scaler": self.scaler.state_dict(),
                "random": random_state(self._drawn or generators()),
            },
            keep_others=keep_others,
        )
        self.saved_step = self.step

    def _step(self) -> None:
        """Take one optimizer step and leave its row with the log."""
        self._drawn = generators()  # to be saved should this step fail
        settings, optimizer = self.setup.settings, self.optimizer
        started = time.perf_counter()
        loss = torch.zeros((), device=self.setup.device)
        num_tokens = 0
        for micro in range(settings.grad_accum):
            batch = self.setup.data.train.batch(self.step * settings.grad_accum + micro)
            batch = batch.to(self.setup.device)
            with optimizer.span("forward"):
                part = cross_entropy(forward(self.setup.model, batch), batch)
                part = part / settings.grad_accum
            with optimizer.span("backward"):
                self.scaler.scale(part).backward()
            loss += part.detach()
            num_tokens += batch.num_tokens
        taken = self._update()
        if taken:
            self.schedule.step()
        self.step += 1
        self._drawn = None
        row = {"step": self.step, "loss": loss, "tokens": num_tokens, "skipped": not taken}
        self.rows.add(row | {"seconds": time.perf_counter() - started}, optimizer.report)
        self._tell_decisions()

    def _tell_decisions(self) -> None:
        """Show the setting in force, and why it is another than before."""
        if self.tuning is None:
            return
        for decision in self.tuning.news():
            self.reporter.say(
                f"after step {decision.step}: {decision.new} ({decision.by}: {decision.reason})"
            )
        self.reporter.show_setting(str(self.tuning.knobs(self.optimizer)))

    def _update(self) -> bool:
        """Clip, where the optimizer doesn't, and step; False if the loss scale overflowed."""
        settings = self.setup.settings
        scale = self.scaler.get_scale()
        if settings.gradients == "keep" and settings.max_grad_norm is not None:
            # Gradients still carry the loss scale here: the optimizer divides by it in its step.
            self.optimizer.clip_grad_norm_(settings.max_grad_norm * scale)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()  # a step that overflowed has left its gradients behind
        return self.scaler.get_scale() >= scale

    def _restore(self, checkpoint: Checkpoint) -> None:
        state = checkpoint.state
        self.setup.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.scaler.load_state_dict(state["scaler"])
        set_random_state(state["random"])
        self.step = self.saved_step = checkpoint.step
        found = changes(self.setup, checkpoint)
        self.changes = [*state["changes"], *found]
        if found:
            change_rate(self.optimizer, self.schedule, self.setup.settings.lr)
            for line in told(found, self.setup, self.optimizer, self.rising):
                self.reporter.say(line)
