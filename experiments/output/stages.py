"""Stages of long work that is not training: a bar on a terminal, a line for each elsewhere."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console

from experiments.output.bar import Bar
from experiments.output.outlook import Outlook, PlannedRun, in_words


class Stages:
    """Shows one stage after another on one console, planned ones with the time of them all."""

    def __init__(
        self,
        console: Console | None = None,
        progress: Callable[[float, str], None] = lambda share, text: None,
    ) -> None:
        """Show nothing yet.

        Args:
            console: Where to write; None is standard error, so that output can be piped.
            progress: Called with the share of planned stages that is done, and what is under way.
        """
        self.console = console or Console(stderr=True, highlight=False)
        self._progress = progress
        self._outlook: Outlook | None = None

    @contextmanager
    def planned(self, stages: Sequence[PlannedRun], *, is_guessed: bool) -> Iterator[None]:
        """Show the stages that follow as one.

        Args:
            stages: Each one's parts, and what a part costs.
            is_guessed: Whether costs are seconds, so that there is an estimate at once.
        """
        self._outlook = Outlook(stages, is_guessed=is_guessed)
        seconds = self._outlook.seconds_left()
        estimate = (
            "" if seconds is None else f" That takes {in_words(seconds)} on two quiet cores."
        )
        names = ", ".join(stage.label for stage in stages)
        self.console.print(f"To do: {names}.{estimate}", markup=False, soft_wrap=True)
        with Bar(self.console, "", 1.0, is_counted=False, has_time_left=False) as self._whole:
            try:
                yield
            finally:
                self._outlook = None

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Callable[[], None]]:
        """Show a stage of so many parts; yield what to call after each."""
        started = time.monotonic()
        outlook = self._outlook
        if outlook is None:
            with Bar(self.console, f"{name:<34}", total) as bar:
                yield self._counting(bar.update)
        else:
            outlook.start(0)
            self._show(outlook)

            def show(done: int) -> None:
                outlook.step(done)
                self._show(outlook)

            yield self._counting(show)
            outlook.step(outlook.runs[outlook.number - 1].steps)  # it may have ended early
            self._show(outlook)
            name = outlook.label
        if not self.console.is_terminal:
            left = "" if outlook is None else f"; {_left(outlook)}"
            taken = time.monotonic() - started
            self.console.print(f"{name}: {taken:.0f} s{left}", markup=False)

    def _show(self, outlook: Outlook) -> None:
        self._progress(outlook.share, outlook.label)
        self._whole.update(outlook.share, label=f"{outlook.label:<40}", text=_left(outlook))

    @staticmethod
    def _counting(show: Callable[[int], None]) -> Callable[[], None]:
        """Return a function that counts a part each time it is called."""
        parts = itertools.count(1)
        return lambda: show(next(parts))


def _left(outlook: Outlook) -> str:
    seconds = outlook.seconds_left()
    return "" if seconds is None else f"all done in {in_words(seconds)}"
