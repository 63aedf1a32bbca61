"""No step on a GPU is shorter than the host takes to launch it."""

import pytest

from sim.hardware.catalog import find_machine
from sim.hardware.unknown import generic_cpu
from sim.models.table import find_model
from sim.models.workload import Workload
from sim.simulate import Strategy, simulate
from sim.steady import steady
from sim.timing.block_plan import BlockPlan
from sim.timing.costs import costs_of
from sim.timing.phases import costs_of_phases

ZENFLOW = Strategy.of("zenflow", select_interval=0)
KEEPS = Strategy.of("zenflow", select_interval=0, releases=False)


def costs(bucket, launch=25e-6, accumulation=1, machine=None):
    """Return a small model on a machine whose host launches so fast, seconds."""
    machine = machine or find_machine("hgx-h100", 1)
    machine = machine.with_values({"overheads.bucket": bucket})
    if not machine.device.is_cpu:
        launches = {"device.launch": launch, "device.backward_launch": launch}
        machine = machine.with_values({"overheads.step": 1e-9, **launches})
    work = Workload.of_config(
        *find_model("qwen2.5-0.5b"), batch_size=4, sequence=512, accumulation=accumulation
    )
    return costs_of(work, machine)


def launching(costs, strategy):
    """Return the seconds in which the host launches a step, by hand."""
    passes = [seconds for segment in costs.segments for seconds in segment.launching]
    matrices = sum(share.matrices for share in BlockPlan(costs, strategy.config).shares)
    overheads = costs.hardware.overheads
    python = matrices * overheads.bucket.value + overheads.step.value
    return costs.accumulation * sum(passes) + python


@pytest.mark.parametrize("strategy", [ZENFLOW, KEEPS], ids=["release", "keep"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_step_is_the_longer_of_device_and_launches(strategy, accumulation):
    quick, slow = costs(1e-9, 1e-9, accumulation), costs(5e-3, 25e-6, accumulation)
    of_device = steady(quick, strategy).step_seconds
    of_host = launching(slow, strategy)
    assert of_host > 2 * of_device
    found = steady(slow, strategy)
    assert found.step_seconds == pytest.approx(of_host, rel=1e-6)
    assert found.busy_seconds["launch"] == pytest.approx(of_host, rel=1e-6)
    assert found.stall_seconds == pytest.approx(0.0, abs=1e-9)  # for nothing that moves
    assert launching(quick, strategy) < 0.01 * of_device


@pytest.mark.parametrize("strategy", [ZENFLOW, KEEPS], ids=["release", "keep"])
@pytest.mark.parametrize("bucket", [1e-5, 5e-4, 3e-3])
def test_the_replay_launches_as_the_simulation_does(strategy, bucket):
    own = costs(bucket)
    replayed, simulated = steady(own, strategy), simulate(own, strategy)
    assert replayed.step_seconds == pytest.approx(simulated.step_seconds, rel=1e-9)
    assert replayed.busy_seconds == pytest.approx(dict(simulated.busy_seconds), rel=1e-9)
    assert "launch" in simulated.timeline.lanes


def test_a_matrix_that_the_device_keeps_whole_takes_none_of_the_engines_python():
    own = costs(5e-3)
    found = steady(own, Strategy.of("on_device"))
    passes = own.accumulation * sum(sum(segment.launching) for segment in own.segments)
    step = own.hardware.overheads.step.value
    assert found.busy_seconds["launch"] == pytest.approx(passes + step)


def test_a_cpu_launches_nothing_ahead_and_phases_have_launches_in_them():
    given = costs_of_phases(
        forward=1.0, backward=2.0, d2h=1.0, update=3.0, h2d=1.0, num_params=10**9
    )
    for own in (costs(1e-4, machine=generic_cpu(4, 64e9)), given):
        assert not own.are_launched
        assert "launch" not in steady(own, ZENFLOW).busy_seconds
