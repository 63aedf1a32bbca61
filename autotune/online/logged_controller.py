"""LoggedController: writes another controller's decisions into the run's decisions file.

For controllers that decide and do no more; the twin writes its own lines, with its predictions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autotune.decisions.file import Decision, DecisionLog
from zenflow.controller import AbstractController
from zenflow.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from autotune.decisions.records import Deciders
    from zenflow.controller import ObservedTimeline
    from zenflow.knobs import Knobs
    from zenflow.report import StepReport


class LoggedController(AbstractController):
    """A controller whose every change of knobs is a line of a decisions file.

    The line has the mean step time since the change before.

    Examples:
        >>> from pathlib import Path
        >>> from autotune.online.zen_auto import ZenAuto
        >>> zen_auto = ZenAuto(largest=8)
        >>> controller = LoggedController(
        ...     zen_auto, DecisionLog(Path("decisions.jsonl")), by="zen-auto",
        ...     reason=lambda: f"window of {zen_auto.wanted():.1f} steps")
        >>> controller.largest_interval
        8
    """

    def __init__(
        self,
        inner: AbstractController,
        log: DecisionLog,
        *,
        by: Deciders,
        reason: Callable[[], str],
    ) -> None:
        """Wrap a controller, and name its log.

        Args:
            inner: Asked after every step.
            log: Takes the lines.
            by: Whom they name.
            reason: Asked just after a decision why it was taken.
        """
        self.inner = inner
        self._reason = reason
        self.measures_windows = inner.measures_windows
        self.curve_interval = inner.curve_interval
        self.least_topk_ratio = inner.least_topk_ratio
        self.largest_interval = inner.largest_interval
        self.timeline_steps = inner.timeline_steps
        self._log = log
        self._by = by
        self._seen = 0
        self._steps = 0
        self._seconds = 0.0

    def attach(self, observed: ObservedTimeline) -> None:
        """Hand the timeline on."""
        self.inner.attach(observed)

    @property
    def search_seconds(self) -> float:
        """CPU seconds of the controller's search."""
        return self.inner.search_seconds

    def close(self) -> None:
        """End the wrapped controller's background work."""
        self.inner.close()

    def next_knobs(self, step: int, report: StepReport | None, knobs: Knobs) -> Knobs:
        """Return the wrapped controller's decision, written down if it changes anything."""
        if report is not None and report.step > self._seen:
            self._seen = report.step
            self._steps += 1
            self._seconds += report.seconds
        new = self.inner.next_knobs(step, report, knobs)
        if new != knobs:
            self._log.append(self._decision(step, report, knobs, new))
            self._steps, self._seconds = 0, 0.0
        return new

    def _decision(self, step: int, report: StepReport | None, old: Knobs, new: Knobs) -> Decision:
        return Decision(
            step=step,
            window=len(self._log.decisions),
            by=self._by,
            old=old,
            new=new,
            predicted_step_seconds=None,
            measured_step_seconds=self._seconds / self._steps if self._steps else None,
            gain=None,
            error=None,
            rho=None if report is None else 1 - report.captured_energy,
            reason=self._reason(),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the controller's state, and what the next line's step time is a mean of."""
        return {
            "inner": self.inner.state_dict(),
            "seen": self._seen,
            "steps": self._steps,
            "seconds": self._seconds,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that ``state_dict`` returned.

        Raises:
            CheckpointError: The state isn't this controller's.
        """
        try:
            inner = state["inner"]
            self._seen, self._steps = int(state["seen"]), int(state["steps"])
            self._seconds = float(state["seconds"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the state holds {', '.join(map(repr, state))}, which is not that of a "
                f"{type(self).__name__}: resume with the controller that was saved"
            ) from error
        self.inner.load_state_dict(inner)
