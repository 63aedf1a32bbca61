"""The training loop, and a run from its settings to its files."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.nn import functional

from experiments.output.files import write_json
from experiments.output.progress import Reporter
from experiments.output.provenance import provenance
from experiments.training.data.batches import IGNORED, Batch
from experiments.training.models.pretrained import save_model_folder
from experiments.training.saved.checkpoint import (
    CHECKPOINTS,
    Checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from experiments.training.saved.resume import (
    Generators,
    change_rate,
    changes,
    check_same_run,
    generators,
    random_state,
    set_random_state,
    told,
    with_rise,
)
from experiments.training.saved.saving import (
    SavePace,
    how_to_go_on,
    save_or_warn,
    saving_first,
    warn_of_space,
)
from experiments.training.settings import TrainSettings
from experiments.training.setup import (
    Workbench,
    build_workbench,
    describe,
    make_optimizer,
    make_schedule,
    warmup_steps,
)
from experiments.training.step_log import read_steps
from experiments.training.step_rows import StepRows
from experiments.training.stop import StopRequest
from experiments.training.summary import described, summarize, write_results
from experiments.training.tuned.run import Tuning, with_start
from zenflow.errors import CheckpointError

MODEL = "model"
"""Folder of the exported weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended."""

    summary: dict[str, Any]
    steps: int
    """Steps taken, those before a resume included."""
    stopped: bool
    """Whether a signal ended it before its last step."""


def run(
    settings: TrainSettings,
    folder: Path,
    *,
    reporter: Reporter,
    stop: StopRequest,
    resume: bool = False,
) -> Outcome:
    """Train, and leave config.json, steps.jsonl, summary.json, trace, picture and checkpoint.

    Args:
        settings: What to do.
        folder: Where the files go; made if missing.
        reporter: Hears of every step.
        stop: Asked after every step whether to end early.
        resume: Go on from the checkpoint in ``folder``.

    Raises:
        ConfigError: The settings can't be carried out.
        CheckpointError: A checkpoint can't be written, read, or is of another run.
    """
    checkpoint = None
    if resume:  # damage is found before anything large is loaded
        checkpoint = load_checkpoint(folder / CHECKPOINTS)
        read_steps(folder / "steps.jsonl")
    bench = build_workbench(settings)
    if checkpoint is not None:
        check_same_run(bench, checkpoint)  # before any file of the run is touched
    bench = with_start(bench, folder if resume else None)
    folder.mkdir(parents=True, exist_ok=True)
    with _training(bench, folder, reporter, checkpoint) as training:
        reporter.detail(describe(bench))
        reporter.detail(str(training.optimizer.memory))
        write_json(folder / "config.json", _config_record(bench, training.changes))
        warn_of_space(training, bench.model_bytes)
        return training.run(stop)


@contextmanager
def _training(
    bench: Workbench, folder: Path, reporter: Reporter, checkpoint: Checkpoint | None
) -> Iterator[Training]:
    """Yield the loop's object and end the optimizer's threads behind it, whatever happened."""
    lines = None if checkpoint is None else checkpoint.state.get("decision_lines")
    with ExitStack() as stack:
        tuning = Tuning.of(
            bench if checkpoint is None else with_rise(bench, checkpoint), folder, lines
        )
        if tuning is not None:
            stack.callback(tuning.close)
        training = Training(bench, folder, reporter, checkpoint, tuning)
        stack.callback(training.close)
        yield training


class Training:
    """A run in progress."""

    def __init__(
        self,
        bench: Workbench,
        folder: Path,
        reporter: Reporter,
        checkpoint: Checkpoint | None,
        tuning: Tuning | None,
    ) -> None:
        """Make the optimizer and schedule, and take up a checkpoint's state if there is one."""
        self.bench = bench
        self.folder = folder
        self.reporter = reporter
        self.tuning = tuning
        self.optimizer = make_optimizer(bench, None if tuning is None else tuning.controller)
        self.rising = warmup_steps(bench.settings, bench.total_steps)
        """Steps over which the learning rate rises; a run that is made longer keeps them."""
        if checkpoint is not None:
            self.rising = checkpoint.state["warmup_steps"]
        self.schedule = make_schedule(
            self.optimizer, bench.settings, bench.total_steps, self.rising
        )
        half = bench.settings.dtype == "float16"
        self.scaler = torch.amp.GradScaler(
            bench.device.type, enabled=half, **bench.settings.grad_scaler
        )
        self.step = 0
        self.saved_step: int | None = None
        """Of the newest checkpoint; None if there is none."""
        self.changes: list[dict[str, Any]] = []
        """What was changed when the run was resumed, of what its weights depend on."""
        self._drawn: Generators | None = None
        torch.manual_seed(bench.settings.seed)  # dropout, where a model has it
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
        self.reporter.start(self.bench.settings.label, self.step, self.bench.total_steps)
        self._tell_decisions()
        with saving_first(self, self.bench.settings.lr):
            self._train(stop)
            summary, troubles = self._finish()
        if troubles:
            raise CheckpointError(
                f"the run in {self.folder} ended after step {self.step}, but could not write:\n"
                + "".join(f"- {trouble}\n" for trouble in troubles)
                + f"Mend that, then go on. {how_to_go_on(self)}"
            )
        return Outcome(
            summary=summary, steps=self.step, stopped=self.step < self.bench.total_steps
        )

    def _train(self, stop: StopRequest) -> None:
        """Take steps until there are no more, or a signal has come."""
        settings = self.bench.settings
        pace = SavePace(settings.save_every, settings.save_minutes)
        while not self._is_done and not stop.requested:
            self._step()
            if self._is_evaluation_due():
                self.rows.add_evaluation(self.evaluate())
            if pace.is_due(self.step) and not self._is_done:  # the end saves anyway
                save_or_warn(self, pace)
        self.optimizer.synchronize()

    def _finish(self) -> tuple[dict[str, Any], list[str]]:
        """Write the run's files, the checkpoint first; return summary and what went wrong."""
        self.rows.flush(self.optimizer.report)
        timeline = self.optimizer.timeline
        evaluation: dict[str, Any] = {}
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
            self.bench, self.optimizer, self.folder, evaluation, tuning=self.tuning
        )
        with noting():
            if self.tuning is not None and self._is_done:
                self.tuning.end(self.step, summary["run_seconds"])
            traced = described(timeline, self.bench, summary)
            tuning = self.tuning if self._is_done else None
            missed = write_results(self.folder, summary, traced, tuning)
            if missed is not None:
                self.reporter.say(missed)
        return summary, troubles

    def evaluate(self) -> dict[str, Any]:
        """Return loss (and accuracy) on held-out batches, with the true weights."""
        settings, data = self.bench.settings, self.bench.data
        count = min(settings.eval_batches, data.held_out.per_epoch)
        losses = correct = targets = 0.0
        with self.true_weights(), torch.no_grad():
            for index in range(count):
                batch = data.held_out.batch(index).to(self.bench.device)
                logits = forward(self.bench.model, batch)
                num_targets = batch.targets.numel()
                losses += cross_entropy(logits, batch).item() * num_targets
                correct += (logits.argmax(-1) == batch.targets).sum().item()
                targets += num_targets
        result = {"eval_loss": losses / targets}
        if data.task == "classification":
            result["eval_accuracy"] = correct / targets
        return result

    def export(self) -> None:
        """Write the true weights as a folder that ``--model`` loads."""
        with self.true_weights():
            save_model_folder(self.bench.model, self.bench.tokenizer, self.folder / MODEL)

    @contextmanager
    def true_weights(self) -> Iterator[None]:
        """Evaluate and export the weights as the optimizer knows them, without prediction."""
        self.optimizer.eval()
        self.bench.model.eval()
        try:
            yield
        finally:
            self.bench.model.train()
            self.optimizer.train()

    @property
    def _is_done(self) -> bool:
        return self.step == self.bench.total_steps

    def _is_evaluation_due(self) -> bool:
        """Return whether to evaluate now; not among the last steps, whose spans are recorded."""
        settings = self.bench.settings
        if not settings.eval_every or self.step % settings.eval_every:
            return False
        return self.step <= self.bench.total_steps - settings.timeline_steps

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
                "settings": self.bench.settings.to_dict(),
                "total_steps": self.bench.total_steps,
                "warmup_steps": self.rising,
                "changes": self.changes,
                "data": self.bench.fingerprint,
                "model": dict(self.bench.model.state_dict()),
                "optimizer": self.optimizer.state_dict(),
                "schedule": self.schedule.state_dict(),
                "scaler": self.scaler.state_dict(),
                "random": random_state(self._drawn or generators()),
            },
            keep_others=keep_others,
        )
        self.saved_step = self.step

    def drop_gradients(self) -> None:
        """Forget the step under way."""
        self.optimizer.zero_grad()

    def _step(self) -> None:
        """Take one optimizer step and leave its row with the log."""
        self._drawn = generators()  # to be saved should this step fail
        settings, optimizer = self.bench.settings, self.optimizer
        started = time.perf_counter()
        loss = torch.zeros((), device=self.bench.device)
        num_tokens = 0
        for micro in range(settings.grad_accum):
            batch = self.bench.data.train.batch(self.step * settings.grad_accum + micro)
            batch = batch.to(self.bench.device)
            with optimizer.span("forward"):
                part = cross_entropy(forward(self.bench.model, batch), batch)
                part = part / settings.grad_accum
            with optimizer.span("backward"):
                self.scaler.scale(part).backward()  # type: ignore[no-untyped-call]
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
        settings = self.bench.settings
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
        self.bench.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.scaler.load_state_dict(state["scaler"])
        set_random_state(state["random"])
        self.step = self.saved_step = checkpoint.step
        found = changes(self.bench, checkpoint)
        self.changes = [*state["changes"], *found]
        if found:
            change_rate(self.optimizer, self.schedule, self.bench.settings.lr)
            for line in told(found, self.bench, self.optimizer, self.rising):
                self.reporter.say(line)


def forward(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Return the model's logits for a batch; a mask goes along where there is padding."""
    masks = {} if batch.mask is None else {"attention_mask": batch.mask}
    logits: torch.Tensor = model(input_ids=batch.inputs, **masks).logits
    return logits


def cross_entropy(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the mean loss over the batch's targets, in float32 whatever the model's dtype."""
    flat = logits.float().flatten(0, -2)
    return functional.cross_entropy(flat, batch.targets.flatten(), ignore_index=IGNORED)


def _config_record(bench: Workbench, made: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "settings": bench.settings.to_dict(),
        "config": bench.config.to_dict(),
        "total_steps": bench.total_steps,
        "steps_per_epoch": bench.steps_per_epoch,
        "task": bench.data.task,
        "data": bench.data.name,
        "data_fingerprint": bench.fingerprint,
        "changes": list(made),
        "device": str(bench.device),
        **provenance(),
    }
