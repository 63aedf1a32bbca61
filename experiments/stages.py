"""Stages of long work that is not training: a bar for each on a terminal, a line elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)


class Stages:
    """Shows one stage after another on one console."""

    def __init__(self, console: Console | None = None) -> None:
        """Write to ``console``; None is standard error, so that output can be piped."""
        self.console = console or Console(stderr=True, highlight=False)

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Callable[[], None]]:
        """Show a stage of so many parts; yield what to call after each."""
        started = time.monotonic()
        if not self.console.is_terminal:
            yield lambda: None
            self.console.print(f"{name}: {time.monotonic() - started:.0f} s", markup=False)
            return
        columns = (
            TextColumn("{task.description:<34}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.console) as progress:
            task = progress.add_task(name, total=total)
            yield lambda: progress.advance(task)
