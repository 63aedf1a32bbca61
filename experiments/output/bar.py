"""One bar on a terminal; elsewhere a line every ten seconds, for who asks when one is due."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

_SECONDS_BETWEEN_LINES = 10.0
_WIDE = 132


def wide_console() -> Console:
    """Return a console on standard output; a file or a pipe, which has no width, is wide."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_WIDE)


class Bar:
    """Progress of one thing, with a text beside it."""

    def __init__(
        self,
        console: Console,
        label: str,
        total: float,
        *,
        done: float = 0,
        is_counted: bool = True,
        has_time_left: bool = True,
    ) -> None:
        """Show nothing yet.

        Args:
            console: Where the bar appears, if that is a terminal.
            label: What stands before the bar.
            total: What there is to do.
            done: What of it lies behind.
            is_counted: Whether numbers stand beside the bar, or the share in percent.
            has_time_left: Whether the time left, as the bar guesses it, ends the line.
        """
        self.is_shown = console.is_terminal
        self._last_line = time.monotonic()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn() if is_counted else TaskProgressColumn(),
            TextColumn("{task.fields[text]}"),
            *([TimeRemainingColumn()] if has_time_left else []),
            console=console,
            disable=not self.is_shown,
        )
        self._task = self._progress.add_task(label, total=total, text="")
        self._progress.update(self._task, completed=done)

    def __enter__(self) -> Bar:
        """Show the bar."""
        self._progress.start()
        return self

    def __exit__(self, *unused: object) -> None:
        """Leave the bar as it is."""
        self._progress.stop()

    def update(self, done: float, *, label: str | None = None, text: str = "") -> None:
        """Show the progress so far."""
        changes: dict[str, Any] = {} if label is None else {"description": label}
        self._progress.update(self._task, completed=done, text=text, **changes)

    def wait(self) -> None:
        """Let ten seconds pass before the next line."""
        self._last_line = time.monotonic()

    def is_line_due(self) -> bool:
        """Return whether there is no bar and ten seconds have passed since the last line."""
        waited = time.monotonic() - self._last_line
        if self.is_shown or waited < _SECONDS_BETWEEN_LINES:
            return False
        self.wait()
        return True
