"""What an optimizer lets its user see of its work: report, timeline, the controller's log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from zenflow.engine import Engine
from zenflow.report import StepReport
from zenflow.timeline import Timeline


class Observed:
    """The read-only part of the optimizer's surface."""

    @property
    def _running(self) -> Engine:
        raise NotImplementedError

    @property
    def report(self) -> StepReport | None:
        """What the last finished step did; on a GPU the step before the last, so nothing waits."""
        return self._running.report

    @property
    def interval_log(self) -> list[tuple[int, int]]:
        """(step, S) of every change of the window length: with it a run can be replayed."""
        return list(self._running.interval_log)

    @property
    def timeline(self) -> Timeline:
        """Spans of the last `timeline_steps` steps; on a GPU this waits for their events."""
        engine = self._running
        emulated = engine.d2h.bytes_per_second is not None
        device = str(engine.device.torch_device)
        return engine.recorder.timeline(
            {"source": "measured", "device": device, "emulated_link": emulated}
        )

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record what happens inside as a span of the device lane: "forward", "backward"."""
        engine = self._running
        start = engine.device.timing_mark()
        try:
            yield
        finally:
            engine.recorder.add(
                "device", name, start, engine.device.timing_mark(), engine.step + 1
            )
