import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.zenflow.test_report import a_report
from zenflow import (
    AbstractIntervalController,
    CheckpointError,
    ConfigError,
    FixedInterval,
    LoggedIntervals,
)


def test_fixed_interval_does_not_follow_the_report():
    assert FixedInterval(8).next_interval(a_report(update_interval=2)) == 8


@pytest.mark.parametrize("interval", [0, -1, 1.5, True, "auto"])
def test_an_interval_is_a_whole_number_of_at_least_one(interval):
    with pytest.raises(ConfigError, match="must be an integer >= 1"):
        FixedInterval(interval)
    with pytest.raises(ConfigError, match="must be an integer >= 1"):
        LoggedIntervals([(3, interval)])


def test_a_log_is_replayed_from_its_steps_on():
    controller = LoggedIntervals([(3, 2), (5, 8)])
    decisions = [
        controller.next_interval(a_report(step=step, update_interval=4)) for step in range(1, 8)
    ]
    assert decisions == [4, 4, 2, 2, 8, 8, 8]


def test_steps_of_a_log_ascend():
    with pytest.raises(ConfigError, match="must ascend, got 3 after 3"):
        LoggedIntervals([(3, 2), (3, 4)])


class Doubling(AbstractIntervalController):
    """Doubles S at every fourth step."""

    def next_interval(self, report):
        return report.update_interval * 2 if report.step % 4 == 0 else report.update_interval


def run(controller, num_steps, interval=1):
    """Return the log of changes that a run under the controller makes."""
    log = []
    for step in range(1, num_steps + 1):
        decided = controller.next_interval(a_report(step=step, update_interval=interval))
        if decided != interval:
            log.append((step, decided))
            interval = decided
    return log


@given(num_steps=st.integers(0, 40))
def test_a_run_replayed_from_its_log_decides_the_same(num_steps):
    log = run(Doubling(), num_steps)
    assert run(LoggedIntervals(log), num_steps) == log


def test_a_stateless_controller_refuses_another_ones_state():
    controller = FixedInterval(4)
    controller.load_state_dict(controller.state_dict())
    with pytest.raises(CheckpointError, match="keeps no state, but the checkpoint has 'norm'"):
        controller.load_state_dict({"norm": 1.0})
