"""Views of an optimizer's work for its user: report, timeline, log of decisions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from zenflow.knobs import Knobs
from zenflow.report import StepReport
from zenflow.surface.with_engine import WithEngine
from zenflow.trace.timeline import Timeline


class Observed(WithEngine):
    """The read-only part of the optimizer's surface."""

    @property
    def report(self) -> StepReport | None:
        """Report of the last finished step; on a GPU of the one before, so that nothing waits."""
        return self._running.reporter.report

    @property
    def decision_log(self) -> list[tuple[int, Knobs]]:
        """Log of changes, (step, knobs), in force from the step after: replays a tuned run."""
        return list(self._running.decisions.log)

    @property
    def timeline(self) -> Timeline:
        """Spans of the last `timeline_steps` steps; on a GPU this waits for their events."""
        return self._running.timeline

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record the `with` block as a span of the device lane: "forward", "backward"."""
        engine = self._running
        start = engine.device.timing_mark()
        try:
            yield
        finally:
            if self._is_here:  # a fork that ends inside of it has no say
                engine.recorder.add(
                    "device", name, start, engine.device.timing_mark(), engine.step + 1
                )
