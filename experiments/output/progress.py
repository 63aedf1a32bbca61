"""What a person sees of a run: a bar on a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO

from rich.console import Console

from experiments.output.bar import Bar
from experiments.output.outlook import Outlook, in_words
from experiments.output.run_types import StepRow

_SMOOTHING = 0.9
"""Weight of the past in the shown step time and stall share."""


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
        self._smooth: dict[str, float] = {}
        self._setting = ""
        self._outlook: Outlook | None = None

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

    def plan(self, outlook: Outlook) -> None:
        """Show the runs to come as one, with the time that all of them will take."""
        self._outlook = outlook
        seconds = outlook.seconds_left()
        if seconds is not None:
            self.say(f"All of it takes {in_words(seconds)} on this machine as it is now.")
        self._show("", outlook.done, outlook.total)

    def start(self, label: str, done: int, total: int) -> None:
        """Begin a run of ``total`` steps of which ``done`` lie behind."""
        self._label, self._total, self._smooth = label, total, {}
        self._setting = ""
        if self._outlook is None:
            self._show(label, done, total)
        else:
            self._outlook.start(done)
            if self._bar is not None:
                self._bar.wait()
            self._label = self._outlook.label

    def _show(self, label: str, done: int, total: int) -> None:
        self._bar = Bar(
            self.console,
            f"{label:<14}",
            total,
            done=done,
            has_time_left=self._outlook is None,
        )
        self._bar.__enter__()

    def show_setting(self, setting: str) -> None:
        """Show this setting beside the steps to come."""
        self._setting = setting

    def step(self, row: StepRow) -> None:
        """Show a finished step: its row of the log."""
        done, figures = row["step"], self._figures(row)
        if self._outlook is not None:
            self._outlook.step(done)
            figures, done = f"{figures}  {self._time_left()}", self._outlook.done
        if self._bar is None:
            return
        if self._bar.is_shown:
            with self._outliving():
                self._bar.update(done, label=f"{self._label:<14}", text=figures)
        elif self._bar.is_line_due() or row["step"] == self._total:
            self.say(f"{self._label:<14} step {row['step']}/{self._total}  {figures}")

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

    def _time_left(self) -> str:
        seconds = None if self._outlook is None else self._outlook.seconds_left()
        return "" if seconds is None else f"all done in {in_words(seconds)}"

    def _figures(self, row: StepRow) -> str:
        now = {
            "loss": math.nan if row["loss"] is None else row["loss"],
            "seconds": row["seconds"],
            "stall_seconds": row["stall_seconds"],
        }
        for name, value in now.items():
            old = self._smooth.get(name, value)
            self._smooth[name] = _SMOOTHING * old + (1 - _SMOOTHING) * value
        seconds = self._smooth["seconds"]
        share = self._smooth["stall_seconds"] / seconds if seconds else 0.0
        figures = (
            f"loss {self._smooth['loss']:.3f}  {seconds * 1e3:.0f} ms/step  stalled {share:.0%}"
        )
        return f"{figures}  {self._setting}".rstrip()
