"""From steps to rows of steps.jsonl.

On a GPU the optimizer reports a step while the next one runs, and a loss is a tensor that isn't
computed yet. So a row waits here for its report, and the training loop for nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, cast

from experiments.output.progress import Reporter
from experiments.output.run_types import Evaluation, StepRow
from experiments.training.parts.files.step_log import StepLog
from experiments.training.parts.ranks.ranks import ALONE, Gathered, Ranks
from zenflow.errors import CheckpointError
from zenflow.report import StepReport


class StepRows:
    """Completes rows with their reports, writes them, and shows them."""

    def __init__(
        self,
        path: Path,
        done: int,
        reporter: Reporter,
        last: StepReport | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """Go on with the log at ``path`` after ``done`` steps, whose last report is ``last``.

        Of several ranks the first one writes, with figures of all.
        """
        self._ranks = ranks
        self._log = StepLog(path, keep_steps=done) if ranks.is_first else None
        if self._log is not None and self._log.num_missing:
            reporter.say(
                f"Warning: {path} lacks the rows of {self._log.num_missing} of the {done} steps "
                "taken; figures of the whole run will be without them."
            )
        self._reporter = reporter
        self._waiting: deque[dict[str, Any]] = deque()
        self._sent: deque[tuple[dict[str, Any], Gathered]] = deque()
        """Rows whose figures of other ranks are under way."""
        self._last = last

    def add(self, row: Mapping[str, Any], report: StepReport | None) -> None:
        """Take a step's row (its loss may be a tensor) and the newest report there is."""
        self._waiting.append(dict(row))
        self._take(report)
        self._write(leave=1)

    def add_evaluation(self, result: Evaluation) -> None:
        """Put an evaluation's result into the last step's row, if that is not yet written."""
        if self._waiting:
            self._waiting[-1] |= result

    def flush(self, report: StepReport | None) -> None:
        """Write every row; ``report`` is the last step's."""
        self._take(report)
        self._write(leave=0)

    def sync(self) -> None:
        """Have every row on the disk when the call returns.

        Raises:
            CheckpointError: The disk does not take them.
        """
        try:
            if self._log is not None:
                self._log.sync()
        except OSError as error:
            raise CheckpointError(
                f"the steps' log can't be written ({error}): free space."
            ) from error

    def close(self) -> None:
        """Close the log; rows whose step never ended well are dropped."""
        if self._log is not None:
            self._log.close()

    def _take(self, report: StepReport | None) -> None:
        """Give the report to its row: reports come in order, one for each step really taken."""
        unreported = [
            row for row in self._waiting if not row["skipped"] and "clip_factor" not in row
        ]
        if report is None or not unreported or report is self._last:
            return
        self._last = report
        unreported[0].update(_reported(report, unreported[0]["seconds"]))

    def _write(self, leave: int) -> None:
        while len(self._waiting) > leave:
            row = self._waiting.popleft()
            row["loss"] = float(row["loss"])
            row.setdefault("stall_seconds", 0.0)
            row.setdefault("stall_fraction", 0.0)
            figures = self._ranks.gather([row.get(name, 0.0) for name in _GATHERED])
            self._sent.append((row, figures))
        while len(self._sent) > (leave if self._ranks.are_several else 0):
            row, figures = self._sent.popleft()
            complete = cast("StepRow", _over_ranks(row, figures.get()))
            if self._log is not None:
                self._log.append(complete)
            self._reporter.step(complete)


_GATHERED = ("loss", "seconds", "stall_seconds", "d2h_bytes", "h2d_bytes", "tokens")


def _over_ranks(row: dict[str, Any], figures: list[list[float]]) -> dict[str, Any]:
    """Return a row with what all ranks say of its step; the first one's own report otherwise.

    The loss is the mean, seconds and stall are the slowest rank's, bytes and tokens are sums.
    """
    if len(figures) == 1:
        return row
    losses, seconds, stalls, down, up, tokens = zip(*figures, strict=True)
    return row | {
        "loss": fmean(losses),
        "seconds": max(seconds),
        "stall_seconds": max(stalls),
        "stall_fraction": max(stalls) / max(seconds),
        "d2h_bytes": int(sum(down)),
        "h2d_bytes": int(sum(up)),
        "tokens": int(sum(tokens)),
        "rank_stall_seconds": list(stalls),
    }


def _reported(report: StepReport, seconds: float) -> dict[str, Any]:
    """Return the report's fields with the loop's own seconds.

    The report counts from one step's end to the next, evaluations and saves between them
    included; the loop's clock does not.
    """
    stalled = min(report.stall_seconds, seconds)
    fields = report.to_dict()
    for name in ("step", "seconds", "stall_seconds", "stall_fraction"):
        fields.pop(name)
    return fields | {"stall_seconds": stalled, "stall_fraction": stalled / seconds}
