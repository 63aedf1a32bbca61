"""Objectives: what a measurement is worth."""

import pytest

from autotune.efficiency import FITTED
from autotune.offline.objective import OBJECTIVES, TrialMetrics, dominates, goodput, objectives_of
from zenflow.config import ZenFlowConfig
from zenflow.errors import ConfigError
from zenflow.knobs import Knobs

KNOBS = Knobs.of(ZenFlowConfig(update_interval=4))
DONE = TrialMetrics(
    step_seconds=0.5,
    stall_seconds=0.1,
    device_bytes=2e9,
    host_bytes=3e9,
    staleness=5,
    captured=0.25,
    tokens_per_step=1000,
)


def test_goodput_is_tokens_a_second_times_efficiency():
    assert goodput(DONE, KNOBS) == pytest.approx(2000 * FITTED.of(KNOBS, 0.75))
    stale = Knobs.of(ZenFlowConfig(update_interval=16))
    assert goodput(DONE, stale) < goodput(DONE, KNOBS), "the same step time is worth less"


def test_every_objective_has_its_figure_and_direction():
    values = {name: own.value(DONE, KNOBS) for name, own in OBJECTIVES.items()}
    assert values == {
        "goodput": goodput(DONE, KNOBS),
        "step_seconds": 0.5,
        "stall_seconds": 0.1,
        "staleness": 5.0,
        "device_bytes": 2e9,
        "host_bytes": 3e9,
    }
    maximised = [name for name, own in OBJECTIVES.items() if own.direction == "maximize"]
    assert maximised == ["goodput"]


def test_the_need_is_the_measured_one():
    need = DONE.need
    assert (need.device_bytes, need.host_bytes) == (2e9, 3e9)
    assert (need.staleness, need.captured) == (5, 0.25)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ((10, 1.0), (9, 1.0), True),
        ((10, 0.9), (10, 1.0), True),
        ((10, 1.0), (10, 1.0), False),
        ((11, 1.1), (10, 1.0), False),
        ((9, 1.0), (10, 1.0), False),
    ],
)
def test_dominating_is_nowhere_worse_and_somewhere_better(one, other, expected):
    assert dominates(one, other, objectives_of(["goodput", "step_seconds"])) is expected


@pytest.mark.parametrize(
    ("names", "rule"),
    [
        ([], "needs an objective"),
        (["godput"], "did you mean 'goodput'"),
        (["goodput", "goodput"], "must differ"),
    ],
)
def test_objectives_that_mean_nothing_are_refused(names, rule):
    with pytest.raises(ConfigError, match=rule):
        objectives_of(names)
