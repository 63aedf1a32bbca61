from dataclasses import replace

import pytest

from autotune.decisions.file import DecisionLog
from autotune.online.logged_controller import LoggedController
from tests.autotune.decisions.test_file import START, header
from tests.zenflow.step.test_reporter import a_report
from zenflow.controller import AbstractController
from zenflow.errors import CheckpointError


def why():
    return "it is the third step"


class EveryThird(AbstractController):
    """Doubles S after every third step."""

    largest_interval = 64

    def __init__(self):
        self.calls = 0
        self.observed = None

    def attach(self, observed):
        self.observed = observed

    def next_knobs(self, step, report, knobs):
        self.calls += 1
        return (
            replace(knobs, update_interval=2 * knobs.update_interval) if step % 3 == 0 else knobs
        )

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


@pytest.fixture
def log(tmp_path):
    log = DecisionLog(tmp_path / "decisions.jsonl")
    log.start(header())
    yield log
    log.close()


def run(controller, steps, knobs=START, *, delay=0):
    """Ask after each step; a step takes as many seconds as its number."""
    for step in steps:
        seen = step - delay
        report = a_report(step=seen, seconds=float(seen), captured_energy=0.75) if seen else None
        knobs = controller.next_knobs(step, report, knobs)
    return knobs


def test_a_line_has_the_step_time_since_the_change_before(log):
    controller = LoggedController(EveryThird(), log, by="zen-auto", reason=why)
    assert run(controller, range(1, 7)).update_interval == 16
    first, second = log.decisions
    assert (first.step, first.by, first.reason) == (3, "zen-auto", "it is the third step")
    assert (first.measured_step_seconds, second.measured_step_seconds) == (2, 5)
    assert (first.rho, first.predicted_step_seconds) == (0.25, None)
    assert second.old == first.new
    assert [first.window, second.window] == [0, 1]


def test_reports_that_come_late_count_once(log):
    controller = LoggedController(EveryThird(), log, by="zen-auto", reason=why)
    run(controller, range(1, 4), delay=1)
    report = a_report(step=2, seconds=2.0)
    controller.next_knobs(4, report, log.decisions[-1].new)  # no step has been reported since
    run(controller, range(5, 7), log.decisions[-1].new, delay=1)
    first, second = log.decisions
    assert first.measured_step_seconds == 1.5
    assert second.measured_step_seconds == 4.5


def test_what_the_optimizer_asks_of_a_controller_is_the_inner_ones(log):
    inner = EveryThird()
    inner.measures_windows, inner.curve_interval, inner.least_topk_ratio = True, 7, 0.01
    controller = LoggedController(inner, log, by="twin", reason=why)
    assert controller.measures_windows
    assert (controller.curve_interval, controller.least_topk_ratio) == (7, 0.01)
    assert controller.largest_interval == 64
    controller.attach("timeline")
    assert inner.observed == "timeline"


def test_a_controller_goes_on_as_if_never_interrupted(log, tmp_path):
    controller = LoggedController(EveryThird(), log, by="zen-auto", reason=why)
    knobs = run(controller, range(1, 6))
    resumed = LoggedController(EveryThird(), log, by="zen-auto", reason=why)
    resumed.load_state_dict(controller.state_dict())
    run(resumed, [6], knobs)
    assert resumed.inner.calls == 6
    assert log.decisions[-1].measured_step_seconds == 5
    for state in ({}, {"calls": 3}, {**controller.state_dict(), "steps": "x"}):
        with pytest.raises(CheckpointError, match="not that of a LoggedController"):
            resumed.load_state_dict(state)


def test_what_the_controller_runs_beside_the_training_is_asked_about_and_ended(log):
    class Searching(EveryThird):
        timeline_steps = 5
        search_seconds = 1.5
        is_closed = False

        def close(self):
            self.is_closed = True

    inner = Searching()
    controller = LoggedController(inner, log, by="twin", reason=why)
    assert (controller.timeline_steps, controller.search_seconds) == (5, 1.5)
    controller.close()
    assert inner.is_closed
    plain = LoggedController(EveryThird(), log, by="twin", reason=why)
    assert (plain.timeline_steps, plain.search_seconds) == (0, 0.0)
    plain.close()
