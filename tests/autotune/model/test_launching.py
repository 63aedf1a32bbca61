"""Launches by the host are a part of the twin: found where a GPU waits for them, and bounded."""

import math
import random
from dataclasses import replace

import pytest

from autotune.adviser.adviser import Adviser
from autotune.model.refit import Prior, refit
from autotune.model.twin import NEUTRAL, Twin
from autotune.online.drift import is_other_machine, mean_busy
from sim.hardware.catalog import find_machine
from sim.models.table import find_model
from sim.models.workload import Workload
from sim.simulate import Strategy
from sim.steady import steady
from sim.timing.costs import costs_of
from tests.autotune.worlds import CURVE, HERE, SPACE, Truth, a_question, knobs_at, log_gap
from zenflow.config import ZenFlowConfig

GENERIC = Prior(NEUTRAL, 1.0)
SHORT, LONG = 2, 16
"""Batches at which a step is bound by launches, and by the device."""
DEAR = {"overheads.device_update": 1e9}
"""A device whose updates of columns take long."""
FEWER = knobs_at(topk_ratio=0.05)


def gpu(batch=SHORT, **values):
    """Return the twin of a small model on a GPU."""
    workload = Workload.of_config(*find_model("qwen2.5-0.5b"), batch_size=batch, sequence=512)
    return Twin(workload, find_machine("hgx-h100", 1).with_values(values), ZenFlowConfig())


class OnGpu(Truth):
    """A GPU as it is; nobody is told its constants, and spans hold the waits for launches."""

    def __init__(self, model, **constants):
        super().__init__(CURVE, on=None, **constants)
        self.twin = model

    def is_starved(self, knobs):
        busy = self.forecast(knobs).busy_seconds
        return busy["launch"] > busy["device"] + busy["step"]

    def stretch(self, index, knobs, **others):
        found = super().stretch(index, knobs, **others)
        busy, is_starved = dict(found.busy_seconds), self.is_starved(knobs)
        launching = busy.pop("launch")  # no span has it
        if is_starved:
            busy["device"] = launching - busy["step"]
        return replace(found, busy_seconds=busy, is_starved=is_starved)


@pytest.mark.parametrize("strategy_batch", [SHORT, LONG])
def test_with_neutral_constants_a_gpus_twin_is_the_simulator(strategy_batch):
    model = gpu(strategy_batch)
    costs = costs_of(model.workload, model.profile)
    config = replace(ZenFlowConfig(), select_interval=0)
    expected = steady(costs, Strategy(name="zenflow", config=config))
    found = model.forecast(HERE)
    assert found.step_seconds == pytest.approx(expected.step_seconds, rel=1e-6)
    assert found.busy_seconds["launch"] == pytest.approx(expected.busy_seconds["launch"])


@pytest.mark.parametrize("seed", range(4))
def test_refitted_to_a_run_bound_by_launches_the_twin_has_its_launching(seed):
    draw = random.Random(seed)
    truth = OnGpu(gpu(), launch=draw.uniform(0.8, 2.5), d2h=draw.uniform(0.7, 1.5))
    assert truth.is_starved(HERE)
    found = refit(gpu(), [truth.stretch(0, HERE)], GENERIC)
    assert log_gap(found["launch"], truth.constants["launch"]) < 0.02
    assert found["device"] == pytest.approx(1.0)  # a span that holds waits says nothing of work
    other = knobs_at(topk_ratio=0.3, update_interval=8)
    told = gpu().forecast(other, found).step_seconds
    assert log_gap(told, truth.forecast(other).step_seconds) < 0.02


def test_without_waits_for_launches_they_are_bounded_and_the_devices_work_is_found():
    truth = OnGpu(gpu(), launch=0.25, device=1.4)  # the table has the host four times as slow
    assert not truth.is_starved(HERE)
    found = refit(gpu(), [truth.stretch(0, HERE)], GENERIC)
    told = gpu().forecast(HERE, found)
    actual = truth.forecast(HERE)
    assert told.busy_seconds["launch"] < 1.03 * actual.step_seconds
    assert log_gap(told.step_seconds, actual.step_seconds) < 0.05


def test_a_device_said_to_be_too_slow_is_no_slower_than_its_spans():
    truth = OnGpu(gpu(LONG), launch=2.0, device=0.3)
    assert truth.is_starved(HERE)
    found = refit(gpu(LONG), [truth.stretch(0, HERE)], Prior({**NEUTRAL, "device": 2.0}, 1.0))
    told = gpu(LONG).forecast(HERE, found).step_seconds
    assert log_gap(told, truth.forecast(HERE).step_seconds) < 0.05


def test_decisions_know_that_the_device_has_time_where_launches_bind():
    """Updates of columns are dear here: fewer of them seem to win, but the device waits anyway."""
    truth, model = OnGpu(gpu(LONG, **DEAR), launch=3.0, device=0.8), gpu(LONG, **DEAR)
    assert truth.is_starved(HERE)
    assert not OnGpu(model).is_starved(HERE), "by the table it is the device that binds"
    seen = truth.stretch(0, HERE)

    def promised(constants):
        """Return the gain of halving k that one believes who has these constants."""
        steps = [model.forecast(k, constants).step_seconds for k in (HERE, FEWER)]
        return math.log(steps[0] / steps[1])

    assert promised({**refit(model, [replace(seen, is_starved=False)], GENERIC)}) > 0.08
    assert abs(promised(refit(model, [seen], GENERIC))) < 0.01
    assert log_gap(*(truth.forecast(k).step_seconds for k in (HERE, FEWER))) < 0.01
    question = a_question([seen], HERE, select_seconds=0.0, has_curve=True, num_trials=20)
    advice = Adviser(model, SPACE).advise(question)
    assert advice.best is None or truth.progress(advice.best.knobs) >= truth.progress(HERE)
    assert truth.shortfall(advice.peak.knobs, SPACE.grid()) < 0.001


def test_a_device_that_stops_waiting_is_no_other_machine():
    truth = OnGpu(gpu(), launch=2.0)
    starved = truth.stretch(0, HERE)
    foretold = truth.forecast(HERE).busy_seconds
    assert log_gap(foretold["device"], starved.busy_seconds["device"]) > 0.3
    assert not is_other_machine(starved, {**foretold, "device": foretold["device"] / 2})
    slower = OnGpu(gpu(), launch=5.0).stretch(1, HERE)
    assert is_other_machine(slower, foretold)
    assert not is_other_machine(slower, mean_busy([starved]) | {"launch": 0.0})
