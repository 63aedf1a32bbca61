"""A run on its way, as a callback of the Trainer: steps, evaluations, samples, saves, the end."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

from experiments.output.progress import Reporter
from experiments.training.run.saved.pace import SavePace
from experiments.training.run.stop import StopRequest


class Course(TrainerCallback):
    """Shows a run, saves it by the clock, and ends it where a signal asks for that."""

    def __init__(
        self,
        reporter: Reporter,
        stop: StopRequest,
        pace: SavePace | None,
        patience: int | None,
        answer: Callable[[Any], str] | None,
        told: Callable[[], None],
    ) -> None:
        """Make the callback of one run.

        Args:
            reporter: Shows what happens.
            stop: Asked after every step whether to end.
            pace: When to save by the clock; None saves nothing.
            patience: Evaluations without a lower held-out loss that end the run; None: any.
            answer: Returns a sample of a model's answers in words; None makes none.
            told: Shows what a tuner has decided.
        """
        self._reporter, self._stop = reporter, stop
        self._pace, self._patience, self._answer, self._told = pace, patience, answer, told
        self._began = self._ended = 0.0
        self._seconds, self._tokens = 0.0, 0
        self.losses: list[float] = []
        """Training losses of the steps of this process."""
        self.seconds = 0.0
        """Time of these steps, without evaluations and saves."""
        self.tokens = 0
        """Tokens of these steps, padding aside."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Show the run, from where it goes on."""
        self._tokens = state.num_input_tokens_seen
        self._reporter.start("finetune", state.global_step, state.max_steps)
        self._told()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the step's clock."""
        self._began = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop the clock; ask for a save where one is due, and for the end after a signal."""
        self._ended = time.monotonic()
        self._seconds += self._ended - self._began
        self._told()
        if self._stop.requested:
            control.should_training_stop = True
        if self._pace is None:
            return
        is_last = self._stop.requested or state.global_step >= state.max_steps
        if is_last or self._pace.is_due_by_clock:
            control.should_save = True

    def on_save(self, *_: Any, **__: Any) -> None:
        """Count from now on to the next save."""
        if self._pace is not None:
            self._pace.saved(time.monotonic() - self._ended)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Show a step."""
        if logs is None or "loss" not in logs:
            return
        tokens = state.num_input_tokens_seen - self._tokens
        self._reporter.step(
            {
                "step": state.global_step,
                "loss": logs["loss"],
                "lr": logs["learning_rate"],
                "tokens": tokens,
                "seconds": self._seconds,
                "stall_seconds": logs.get("zenflow/stall_seconds", 0.0),
            }
        )
        self.losses.append(logs["loss"])
        self.seconds += self._seconds
        self.tokens += tokens
        self._seconds, self._tokens = 0.0, state.num_input_tokens_seen

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Any = None, model: Any = None, **_: Any
    ) -> None:
        """Show held-out loss, and a sample of what the model answers now."""
        self._reporter.evaluated(state.global_step, {"eval_loss": metrics["eval_loss"]})
        self.say_sample(model)
        # The log, and no count here: it is part of a checkpoint.
        losses = [row["eval_loss"] for row in evaluations(state)]
        if self._patience and len(losses) - 1 - losses.index(min(losses)) >= self._patience:
            control.should_training_stop = True

    def say_sample(self, model: Any) -> None:
        """Print a sample of a model's answers, where one is asked for."""
        if self._answer is not None:
            self._reporter.say(self._answer(model))

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """End the bar."""
        self._reporter.finish()


def evaluations(state: Any) -> list[dict[str, float]]:
    """Return step and held-out loss of each evaluation of a run, earlier processes included."""
    return [
        {"step": row["step"], "eval_loss": row["eval_loss"]}
        for row in state.log_history
        if "eval_loss" in row
    ]
