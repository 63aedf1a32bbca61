"""Gathering: from the engine's reports and spans to stretches of measured steps.

Selections are no part of stretches: their cost, and their ageing, is measured apart.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median

from autotune.efficiency import EnergyCurve
from autotune.model.stretch import Stretch, robust_mean
from autotune.online.shift_watch import ShiftWatch
from zenflow.controller import ObservedTimeline
from zenflow.knobs import Knobs
from zenflow.report import StepReport
from zenflow.trace.timeline import Timeline

_LEAST_STEPS = 12
"""Least number of steps of a stretch."""
_WINDOWS, _ENOUGH_STEPS = 3, 48
"""Number of windows of a stretch, unless fewer of them are this many steps."""
_NEWEST_BESIDE = 8
"""Number of steps beside a search that are looked at when its answer comes."""
_KEPT = 5
"""Number of selections that are remembered."""
_LEAST_BETWEEN = 20
"""Least number of steps between two selections from which a trend can be told."""


class StretchGatherer:
    """Collects steps with the same knobs, queues full, until they are enough.

    Attributes:
        num_stretches: Finished so far.
        selections: What they cost, and how they age.
        resize_seconds: Stall of the last change of k; None before there was one.
    """

    def __init__(self, start: Knobs, *, rolling: bool = True) -> None:
        """Begin with the knobs that a run starts with; steps of ``rolling`` windows are alike."""
        self.num_stretches = 0
        self.selections = SelectionWatch()
        self.resize_seconds: float | None = None
        self._observed: ObservedTimeline | None = None
        self._reports: list[StepReport] = []
        self._to_skip = settling_steps(start)
        self._is_resizing = False
        self._beside: list[float] = []
        self._rolling = rolling
        self._shifts = self._watch(start)

    def attach(self, observed: ObservedTimeline) -> None:
        """Take the optimizer's timeline."""
        self._observed = observed

    def take(self, report: StepReport, *, is_disturbed: bool = False) -> None:
        """See a step.

        Args:
            report: The newest.
            is_disturbed: Whether searching shared the machine with it. Settings in force while
                their rivals are sought would look slower than those, so that such steps are left
                out, and what came before them: a stretch's steps follow one another.
        """
        self.selections.take(report)
        waited = report.stalls.get("select", 0.0)
        if self._is_resizing and waited > 0:
            self.resize_seconds, self._is_resizing = waited, False
        if self._to_skip > 0:
            self._to_skip -= 1
            return
        seconds = _seconds_of(report)
        if is_disturbed:
            self._reports = []
            self._beside.append(seconds)
            return
        self._beside = []
        self._reports.append(report)
        if self._shifts.take(seconds):
            self._reports = self._reports[-self._shifts.num_since :]

    @property
    def seconds_beside_search(self) -> float | None:
        """Seconds of a step while something searched, the newest ones; None after too few."""
        newest = self._beside[-_NEWEST_BESIDE:]
        return median(newest) if len(newest) >= _NEWEST_BESIDE // 2 else None

    def is_complete(self, knobs: Knobs, hopeless: float = math.inf) -> bool:
        """Whether there are enough steps for a stretch.

        One window is enough after a shift, or where a step takes more than ``hopeless`` seconds.
        """
        count = len(self._reports)
        if count >= stretch_steps(knobs):
            return True
        if count < shortest_steps(knobs):
            return False
        is_hopeless = median(map(_seconds_of, self._reports)) > hopeless
        return is_hopeless or self._shifts.before is not None

    def finish(
        self, step: int, knobs: Knobs, *, sees_spans: bool
    ) -> tuple[Stretch, EnergyCurve | None]:
        """Return the stretch, and the last energy curve in it if there was one.

        Args:
            step: The last step.
            knobs: In force.
            sees_spans: Whether lanes' times are wanted too; on a GPU that waits for the device.
        """
        reports, self._reports = self._reports, []
        seconds = [_seconds_of(r) for r in reports]
        mean, noise = robust_mean(seconds, knobs.update_interval)
        stalled = fmean(r.stall_seconds - r.stalls.get("select", 0.0) for r in reports)
        curves = [r.energy_curve for r in reports if r.energy_curve]
        stretch = Stretch(
            index=self.num_stretches,
            last_step=step,
            knobs=knobs,
            step_seconds=mean,
            noise=noise,
            stall_seconds=max(0.0, stalled),
            rho=1.0 - min(1.0, max(0.0, fmean(r.captured_energy for r in reports))),
            busy_seconds=self._busy(reports) if sees_spans else {},
            is_starved=2 * sum(r.starved > 0 for r in reports) > len(reports),
            before_shift=self._shifts.before,
        )
        self.num_stretches += 1
        self._shifts.before = None
        return stretch, EnergyCurve.of(curves[-1]) if curves else None

    def _busy(self, reports: Sequence[StepReport]) -> Mapping[str, float]:
        """Return each part's busy seconds per step, over whole windows of these steps.

        As far as their spans are kept; the last steps' work is not over.
        """
        timeline = Timeline() if self._observed is None else self._observed.timeline
        newest, interval = reports[-1], reports[-1].update_interval
        first = min((span.step for span in timeline.spans), default=newest.step) + 1
        first = max(first, reports[0].step)  # the first that is kept may be cut
        last = newest.step - 1
        count = (last - first + 1) // interval * interval
        if count < 1:
            return {}
        inner = timeline.steps(last - count + 1, last)
        busy = {lane: inner.busy(lane) / count for lane in inner.lanes}
        stepless = tuple(s for s in inner.spans if (s.lane, s.name) != ("device", "step"))
        forward_backward = replace(inner, spans=stepless).busy("device") / count
        return {
            **busy, "device": forward_backward, "step": busy.get("device", 0.0) - forward_backward,
        }  # fmt: skip

    def restart(self, former: Knobs, knobs: Knobs) -> None:
        """Begin anew with other knobs, once windows of the former ones are over."""
        self._reports = []
        self._beside, self._shifts = [], self._watch(knobs)
        self._to_skip = settling_steps(knobs) + former.update_interval
        self._is_resizing = knobs.topk_ratio != former.topk_ratio
        self.selections.interrupt()

    def _watch(self, knobs: Knobs) -> ShiftWatch:
        return ShiftWatch(1 if self._rolling else knobs.update_interval)


def _seconds_of(report: StepReport) -> float:
    """Return a step's seconds without selections."""
    return report.seconds - report.stalls.get("select", 0.0)


def stretch_steps(knobs: Knobs) -> int:
    """Return the steps of a stretch: whole windows, several of them unless they are long."""
    wanted = max(_LEAST_STEPS, min(_WINDOWS * knobs.update_interval, _ENOUGH_STEPS))
    return _whole_windows(wanted, knobs)


def shortest_steps(knobs: Knobs) -> int:
    """Return the steps of the shortest stretch: a window or some, and one whose work goes on."""
    return _whole_windows(_LEAST_STEPS, knobs) + 1


def _whole_windows(wanted: int, knobs: Knobs) -> int:
    return math.ceil(wanted / knobs.update_interval) * knobs.update_interval


def settling_steps(knobs: Knobs) -> int:
    """Return the steps after a change in which queues fill."""
    return knobs.update_interval + 2  # an update lands a step after its window


class SelectionWatch:
    """Follows reports from selection to selection.

    The first selection moves most important columns at once, later ones a few: it is left out.
    """

    def __init__(self) -> None:
        """Start with no selection seen."""
        self._seconds: deque[float] = deque(maxlen=_KEPT)
        self._trends: deque[tuple[float, float]] = deque(maxlen=_KEPT)
        self._captured: list[float] = []
        self._has_selected = False
        self._waited = 0.0
        """Seconds waited in the selection that goes on."""
        self._steps_left = 0
        """Steps left of it, the next one included: rolling blocks each wait for their own end."""

    @property
    def seconds(self) -> float | None:
        """Seconds of one selection, over all its steps; None before the second one."""
        return median(self._seconds) if self._seconds else None

    @property
    def decay(self) -> float | None:
        """Captured share lost per step since the last selection, >= 0; None while unknown."""
        weight = sum(spread for _, spread in self._trends)
        if not weight:
            return None
        return max(0.0, -sum(product for product, _ in self._trends) / weight)

    def take(self, report: StepReport) -> None:
        """See a step."""
        waited = report.stalls.get("select", 0.0)
        if waited > 0 and not self._steps_left:
            self._close()
            self._steps_left = report.update_interval
        if not self._steps_left:
            self._captured.append(report.captured_energy)
            return
        self._waited += waited
        self._steps_left -= 1
        if not self._steps_left:
            if self._has_selected:
                self._seconds.append(self._waited)
            self._has_selected, self._waited = True, 0.0

    def interrupt(self) -> None:
        """Note that the knobs changed: what was captured before and after is not comparable."""
        self._has_selected = False
        self._captured = []
        self._waited, self._steps_left = 0.0, 0

    def _close(self) -> None:
        """Keep the trend between two selections: sums of products about the means."""
        captured, self._captured = self._captured, []
        count = len(captured)
        if not self._has_selected or count < _LEAST_BETWEEN:
            return
        middle, mean = (count - 1) / 2, fmean(captured)
        product = sum((i - middle) * (c - mean) for i, c in enumerate(captured))
        self._trends.append((product, count * (count * count - 1) / 12))
