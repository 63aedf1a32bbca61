"""Progress of a run: a bar on a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO

from rich.console import Console

from experiments.output.bar import Bar
from experiments.output.outlook import Outlook, PlannedRun, in_words
from experiments.output.run_types import Evaluation, StepRow

_LAST_STEPS = 10
"""Steps whose mean time and stall a bar shows; a line shows those since the line before."""


def _discard(file: IO[str]) -> None:
    """Send nowhere what is still written: by a bar's thread, say, until it has seen its end.

    Python flushes standard output as it ends, and exits with 120 where that fails.
    """
    with suppress(OSError), open(os.devnull, "wb") as nowhere:  # a file in memory has no number
        os.dup2(nowhere.fileno(), file.fileno())


class Reporter:
    """Shows the steps of one run after another on one console."""

    def __init__(self, console: Console | None = None) -> None:
        """Write to ``console``; None is standard output."""
        self.console = console or Console(highlight=False)
        self._bar: Bar | None = None
        self._label = ""
        self._total = 0
        self._rows: deque[StepRow] = deque()
        """Rows that the next figures are of."""
        self._setting = ""
        self._outlook: Outlook | None = None
        self._alone: Outlook | None = None
        """Remaining work of a run that shares no bar."""
        self._has_told = False

    def say(self, text: str) -> None:
        """Print text above the bar."""
        with self._outliving():
            self.console.print(text, markup=False, soft_wrap=True)

    @contextmanager
    def _outliving(self) -> Iterator[None]:
        """Show nothing any more once the terminal, or the pipe's reader, is gone: runs go on."""
        try:
            yield
        except (OSError, SystemExit):  # rich leaves the program where a reader is gone
            _discard(self.console.file)
            self.console = Console(quiet=True)
            self._bar = None

    def detail(self, text: str) -> None:
        """Print text that is left out where several runs share a bar."""
        if self._outlook is None:
            self.say(text)

    def once(self, text: str) -> None:
        """Print text that is much the same for all runs, for the first of them."""
        if not self._has_told:
            self.say(text)
        self._has_told = True

    def evaluated(self, step: int, result: Evaluation) -> None:
        """Show an evaluation in the middle of a run; one of several runs keeps it to its log."""
        accuracy = result.get("eval_accuracy")
        told = "" if accuracy is None else f", accuracy {accuracy:.3f}"
        self.detail(f"{self._place(step)}  held-out loss {result['eval_loss']:.4f}{told}")

    def plan(self, outlook: Outlook) -> None:
        """Show the runs to come as one, with the time that all of them will take."""
        self._outlook = outlook
        seconds = outlook.seconds_left()
        if seconds is not None:
            self.say(f"All of it takes {in_words(seconds)} on this machine as it is now.")
        self._show("", outlook.done, outlook.total)

    def start(self, label: str, done: int, total: int) -> None:
        """Begin a run of ``total`` steps of which ``done`` lie behind."""
        self._label, self._total = label, total
        self._setting = ""
        if self._outlook is None:
            self._show(label, done, total)
            self._alone = Outlook([PlannedRun(label, total)], is_guessed=False)
            self._alone.start(done)
        else:
            self._outlook.start(done)
            self._rows.clear()
            if self._bar is not None:
                self._bar.wait()
            self._label = self._outlook.label

    def _show(self, label: str, done: int, total: int) -> None:
        is_shown = self.console.is_terminal
        self._rows = deque(maxlen=_LAST_STEPS if is_shown else None)
        self._bar = Bar(
            self.console,
            f"{label:<14}",
            total,
            done=done,
            has_time_left=self._outlook is None,
        )
        self._bar.__enter__()

    def _place(self, step: int) -> str:
        return f"{self._label:<14} step {step}/{self._total}"

    def show_setting(self, setting: str) -> None:
        """Show the current setting beside the steps to come."""
        self._setting = setting

    def step(self, row: StepRow) -> None:
        """Show a finished step: its row of the log."""
        done, outlook = row["step"], self._outlook or self._alone
        if outlook is not None:
            outlook.step(done)
        if self._bar is None:
            return
        self._rows.append(row)
        if self._bar.is_shown:
            shown = done if self._outlook is None else self._outlook.done
            words = [f"loss {_number(row['loss']):.3f}", *self._speed(), self._setting]
            words += [] if self._outlook is None else [self._time_left("all done in {}")]
            with self._outliving():
                self._bar.update(shown, label=f"{self._label:<14}", text=_joined(words))
        elif self._bar.is_line_due() or done == self._total:
            self.say(_joined([self._place(done), *self._since_last_line(), self._setting]))
            self._rows.clear()

    def finish(self) -> None:
        """End the run's bar, which stays visible; one that is shared goes on to the next run."""
        if self._outlook is None:
            self.close()

    def close(self) -> None:
        """End the bar, whatever it shows."""
        self._outlook = None
        if self._bar is not None:
            with self._outliving():
                self._bar.__exit__()
            self._bar = None

    def _since_last_line(self) -> list[str]:
        """Return figures of all steps since the line before."""
        count, row = len(self._rows), self._rows[-1]
        loss = sum(_number(row["loss"]) for row in self._rows) / count
        steps = f"of {count} steps" if count > 1 else "of 1 step"
        rate = [f"lr {row['lr']:.3g}"] if "lr" in row else []
        left = "all done in {}" if self._outlook is not None else "{} left"
        return [f"mean loss {loss:.3f} {steps}", *self._speed(), *rate, self._time_left(left)]

    def _time_left(self, words: str) -> str:
        outlook = self._outlook or self._alone
        seconds = None if outlook is None else outlook.seconds_left()
        return words.format(in_words(seconds)) if seconds else ""

    def _speed(self) -> list[str]:
        """Return step time, tokens per second and stall of the rows; a bar has the last few."""
        rows = list(self._rows)
        seconds = sum(row["seconds"] for row in rows)
        tokens = sum(row.get("tokens", 0) for row in rows)
        share = sum(row["stall_seconds"] for row in rows) / seconds if seconds else 0.0
        told = [f"{seconds / len(rows) * 1e3:.0f} ms/step"]
        told += [f"{tokens / seconds:,.0f} tokens/s"] if tokens and seconds else []
        return [*told, f"stalled {share:.0%}"]


def _number(loss: float | None) -> float:
    return math.nan if loss is None else loss


def _joined(words: list[str]) -> str:
    return "  ".join(word for word in words if word)
