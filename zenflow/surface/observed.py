"""What an optimizer lets its user see of its work: report, timeline, the controller's log."""

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
        """What the last finished step did; on a GPU the step before the last, so nothing waits."""
        return self._running.reporter.report

    @property
    def decision_log(self) -> list[tuple[int, Knobs]]:
        """(step, knobs) of every change, in force from the step after: a run can be replayed."""
        return list(self._running.decisions.log)

    @property
    def timeline(self) -> Timeline:
        """Spans of the last `timeline_steps` steps; on a GPU this waits for their events."""
        return self._running.timeline

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record what happens inside as a span of the device lane: "forward", "backward"."""
        engine = self._running
        start = engine.device.timing_mark()
        try:
            yield
        finally:
            if self._is_here:  # a fork that ends inside of it has no say
                engine.recorder.add(
                    "device", name, start, engine.device.timing_mark(), engine.step + 1
                )
