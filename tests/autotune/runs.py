"""Runs for a controller: steps as a hidden twin takes them, and advice at a price of one's own."""

import math
from dataclasses import replace

from autotune.adviser.adviser import Adviser
from autotune.adviser.process import AbstractAdviserHandle, Ready
from autotune.constraints import Constraints
from autotune.decisions.file import DecisionLog
from autotune.online.controller import TwinController
from tests.autotune.decisions.test_file import header
from tests.autotune.worlds import CONFIG, HERE, SMALL, twin
from tests.zenflow.step.test_reporter import a_report
from zenflow.errors import WorkerError
from zenflow.report import WindowNorms
from zenflow.trace.timeline import Span, Timeline

SOME_NORMS = (WindowNorms(1, 1.0, 1.0),)


class Priced(AbstractAdviserHandle):
    """Answers at once or after some polls, and says that it took a given CPU time.

    It may fail at a question.
    """

    def __init__(self, adviser, *, start=0.0, forecast=0.0, fails_at=None, polls=0):
        self.asked = []
        self.is_closed = False
        self._adviser = adviser
        self._forecast = forecast
        self._fails_at = fails_at
        self._polls = self._polls_left = polls
        self._answers = [Ready(start, forecast)]

    def ask(self, question):
        self.asked.append(question)
        if len(self.asked) == self._fails_at:
            self._answers.append(WorkerError("the adviser's process has ended"))
            return
        # Prices are made up: the clock of this machine does not count.
        advice = self._adviser.advise(replace(question, most_seconds=math.inf))
        self._answers.append(replace(advice, seconds=self._forecast * advice.num_simulated))

    @property
    def is_busy(self):
        return bool(self._answers)

    def poll(self):
        if self._answers and self._polls_left:
            self._polls_left -= 1
            return None
        self._polls_left = self._polls
        answer = self._answers.pop(0) if self._answers else None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self):
        self.is_closed = True


class Notes:
    """Keeps what a controller writes."""

    def __init__(self):
        self.records = []

    def append(self, record):
        self.records.append(record)


def a_controller(
    *, log=None, total_steps=1500, space=SMALL, prices=None, advises=None, on=None, **settings
):
    """Return a controller and its handle, with a stand-in ``advises`` for its adviser or not.

    The twin is of the machine ``on``. What the controller wrote is in the handle's ``notes``.
    """
    made = []
    log = Notes() if log is None else log

    def make_handle(adviser):
        made.append(Priced(advises or adviser, **(prices or {})))
        return made[-1]

    config = settings.pop("config", CONFIG)
    constraints = settings.pop("constraints", Constraints())
    controller = TwinController(
        Adviser(twin(config, on), space, constraints),
        config=config,
        total_steps=total_steps,
        log=log,
        make_handle=make_handle,
        **settings,
    )
    handle = made[0]
    handle.notes = log
    return controller, handle


class Run:
    """Takes steps as the truth has them, and asks a controller after each, as the engine does."""

    def __init__(self, truth, controller, *, knobs=HERE, late=0, kept=None, slower=lambda: 1.0):
        """Show reports ``late`` steps late; keep spans of the steps that the controller wants.

        A step takes ``slower()`` times as long as in the truth.
        """
        self.truth = truth
        self.knobs = knobs
        self.decision_log = []
        self.step = 0
        self.seconds = 0.0
        self._controller = controller
        self._late = late
        self._slower = slower
        self._settled_from = knobs.update_interval + 3
        self._reports = []
        self._spans = []
        self._kept = controller.timeline_steps if kept is None else kept
        controller.attach(self)

    @property
    def timeline(self):
        first = self.step - self._kept + 1
        return Timeline(span for span in self._spans if span.step >= first)

    def take(self, num_steps, norms=lambda knobs: SOME_NORMS):
        for _ in range(num_steps):
            self._take(norms)
        return self

    def _take(self, norms):
        self.step += 1
        found, knobs = self.truth.forecast(self.knobs), self.knobs
        is_looking = self._controller.measures_windows and self._controller.looks_at_windows
        if self.step < self._settled_from:  # queues fill
            found = replace(found, step_seconds=1.2 * found.step_seconds)
        found = replace(found, step_seconds=self._slower() * found.step_seconds)
        self._record(found)
        self.seconds += found.step_seconds
        report = a_report(
            step=self.step,
            seconds=found.step_seconds,
            stall_seconds=found.stall_seconds,
            stalls={"host": found.stall_seconds},
            captured_energy=self.truth.curve.captured(knobs.topk_ratio),
            update_interval=knobs.update_interval,
            lag=1,
            topk_ratio=knobs.topk_ratio,
            select_interval=knobs.select_interval,
            windows=norms(knobs) if is_looking else (),
            energy_curve=dict(self.truth.curve.points[1:-1]) if self.step % 50 == 0 else None,
        )
        self._reports.append(report)
        shown = self._reports[-1 - self._late] if self.step > self._late else None
        chosen = self._controller.next_knobs(self.step, shown, knobs)
        if chosen != knobs:
            self.decision_log.append((self.step, chosen))
            windows = knobs.update_interval + chosen.update_interval
            self._settled_from = self.step + windows + 3
            self.knobs = chosen

    def _record(self, found):
        """Add the step's spans."""
        for part, seconds in found.busy_seconds.items():
            if seconds:
                lane, name = ("device", "step") if part == "step" else (part, "work")
                at = self.seconds + (found.busy_seconds["device"] if part == "step" else 0.0)
                self._spans.append(Span(lane, name, at, at + seconds, self.step))


def started_log(path, knobs=HERE):
    log = DecisionLog(path)
    log.start(replace(header(), knobs=knobs, largest_interval=max(SMALL.update_intervals)))
    return log
