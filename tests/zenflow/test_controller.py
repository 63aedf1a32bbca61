from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.models import TINY, TinyStack, closing
from tests.zenflow.decisions import decisions, intervals
from tests.zenflow.step.test_reporter import a_report
from zenflow import (
    AbstractController,
    AbstractIntervalController,
    CheckpointError,
    ConfigError,
    FixedInterval,
    Knobs,
    LoggedDecisions,
    Timeline,
    ZenFlowAdamW,
    ZenFlowConfig,
)

CONFIG = ZenFlowConfig(**TINY)
KNOBS = Knobs.of(CONFIG)


def test_fixed_interval_does_not_follow_the_report():
    assert FixedInterval(8).next_interval(a_report(update_interval=2)) == 8


@pytest.mark.parametrize("interval", [0, -1, 1.5, True, "auto"])
def test_an_interval_is_a_whole_number_of_at_least_one(interval):
    with pytest.raises(ConfigError, match="must be an integer >= 1"):
        FixedInterval(interval)
    with pytest.raises(ConfigError, match="must be an integer >= 1"):
        LoggedDecisions([(3, replace(KNOBS, update_interval=interval))])


def test_a_log_is_replayed_from_its_steps_on():
    controller = LoggedDecisions(intervals(CONFIG, [(3, 2), (5, 8)]))
    chosen = [controller.next_knobs(step, None, KNOBS).update_interval for step in range(1, 8)]
    assert chosen == [4, 4, 2, 2, 8, 8, 8]


def test_steps_of_a_log_ascend():
    with pytest.raises(ConfigError, match="must ascend, got 3 after 3"):
        LoggedDecisions(intervals(CONFIG, [(3, 2), (3, 4)]))


class Doubling(AbstractIntervalController):
    """Doubles S at every fourth step."""

    def next_interval(self, report):
        return report.update_interval * 2 if report.step % 4 == 0 else report.update_interval


def run(controller, num_steps, *, delay=0):
    """Return the log of changes that a run makes whose reports come some steps late."""
    knobs, in_force, log = KNOBS, [], []
    for step in range(1, num_steps + 1):
        in_force.append(knobs)
        report = None
        if step > delay:
            of = step - delay
            interval = in_force[of - 1].update_interval
            report = a_report(step=of, update_interval=interval)
        decided = controller.next_knobs(step, report, knobs)
        if decided != knobs:
            log.append((step, decided))
            knobs = decided
    return log


@given(num_steps=st.integers(0, 40))
def test_a_run_replayed_from_its_log_decides_the_same(num_steps):
    log = run(Doubling(), num_steps)
    assert run(LoggedDecisions(log), num_steps) == log


def test_a_late_report_does_not_undo_a_change():
    """Also where the report is of a step that still had the old window length."""
    log = run(Doubling(), 14, delay=1)
    assert [(step, knobs.update_interval) for step, knobs in log] == [(5, 8), (9, 16), (13, 32)]


def test_a_stateless_controller_refuses_another_ones_state():
    controller = FixedInterval(4)
    controller.load_state_dict(controller.state_dict())
    with pytest.raises(CheckpointError, match="keeps no state, but the checkpoint has 'norm'"):
        controller.load_state_dict({"norm": 1.0})


class Chooser(AbstractController):
    """Chooses given knobs after given steps, and keeps what it is shown."""

    def __init__(self, chosen, largest_interval=None):
        self.chosen, self.shown = chosen, []
        self.largest_interval = largest_interval

    def attach(self, observed):
        self.observed = observed

    def next_knobs(self, step, report, knobs):
        self.shown.append((step, report.step, knobs))
        return replace(knobs, **self.chosen.get(step, {}))


def train(controller, num_steps=8, **settings):
    """Return the optimizer after some steps, closed."""
    model = TinyStack()
    optimizer = ZenFlowAdamW(model.parameters(), config=CONFIG, controller=controller, **settings)
    reports = []
    with closing(optimizer):
        for step in range(num_steps):
            model.loss(step).backward()
            optimizer.step()
            reports.append(optimizer.report)
    return optimizer, reports


def test_knobs_hold_from_the_step_after_and_every_change_is_logged():
    chosen = {2: {"update_interval": 2}, 4: {}, 6: {"select_interval": 3}}
    controller = Chooser(chosen)
    optimizer, reports = train(controller)
    changes = [(step, chosen[step]) for step in (2, 6)]
    assert optimizer.decision_log == decisions(CONFIG, changes)
    assert [r.update_interval for r in reports] == [4, 4] + [2] * 6
    assert [r.lag for r in reports] == [1] * 8
    assert [r.select_interval for r in reports] == [100] * 6 + [3] * 2
    steps = range(1, 9)
    assert [(step, of) for step, of, _ in controller.shown] == list(zip(steps, steps, strict=True))
    shown = [knobs for _, _, knobs in controller.shown]
    assert [knobs.update_interval for knobs in shown] == [4, 4] + [2] * 6


def test_a_controller_sees_the_timeline():
    controller = Chooser({})
    train(controller, timeline_steps=2)
    assert isinstance(controller.observed.timeline, Timeline)
    assert {span.step for span in controller.observed.timeline.spans} == {7, 8}


@pytest.mark.parametrize(
    "chosen", [{"update_interval": 0}, {"select_interval": -1}, {"update_interval": "no"}]
)
def test_knobs_that_break_a_rule_are_refused_by_the_controllers_name(chosen):
    with pytest.raises(ConfigError, match=r"(?s)Chooser chose .* after step 3, .*must be"):
        train(Chooser({3: chosen}))


def test_a_state_of_other_blocks_is_refused():
    """As one is that was saved with windows of another length in sight."""
    weight = nn.Parameter(torch.randn(512, 64 * 64))
    with closing(
        ZenFlowAdamW([weight], config=CONFIG, controller=Chooser({}, largest_interval=32))
    ) as saved:
        state = saved.state_dict()
    with (
        closing(ZenFlowAdamW([weight], config=CONFIG, controller=Chooser({}))) as other,
        pytest.raises(CheckpointError, match=r"has 64 blocks .* same largest_interval, and with"),
    ):
        other.load_state_dict(state)


def test_blocks_are_cut_for_the_largest_window_a_controller_may_choose():
    counts = []
    for controller in (None, Chooser({}, largest_interval=2), Chooser({}, largest_interval=32)):
        model = nn.Linear(512, 64 * 256, bias=False)
        model.weight = nn.Parameter(model.weight.detach().t().contiguous())
        optimizer = ZenFlowAdamW([model.weight], config=CONFIG, controller=controller)
        counts.append(len(optimizer._engine.layout.blocks))
        optimizer.close()
    assert counts == [8 * 4, 8 * 4, 8 * 32]
