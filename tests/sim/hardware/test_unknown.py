"""Generic machines: good enough to tell lanes apart, and honest about being guesses."""

import pytest

from sim.hardware.profile import HardwareProfile
from sim.hardware.unknown import SIGMA, generic_cpu, generic_gpu
from sim.models.table import find_model
from sim.models.workload import Workload
from sim.simulate import Strategy, simulate
from sim.timing.costs import costs_of
from zenflow.errors import ConfigError


def workload():
    return Workload.of_config(*find_model("qwen2.5-0.5b"), batch_size=1, sequence=256)


def step_seconds(profile, **changes):
    strategy = Strategy.of("zenflow", **changes)
    return simulate(costs_of(workload(), profile), strategy, keeps_spans=False).step_seconds


def test_a_generic_cpu_is_one_that_the_simulator_runs():
    profile = generic_cpu(8, 32e9)
    assert profile.device.is_cpu
    assert step_seconds(profile) > 0
    assert profile.host.dram_bytes.value == profile.device.memory.value == 32e9


def test_every_figure_of_a_generic_cpu_is_a_guess():
    profile = generic_cpu(2, 8e9)
    guesses = [
        f for f in profile.quantities().values() if f.source == "of no machine in particular"
    ]
    assert {(f.kind, f.sigma) for f in guesses} == {("estimated", SIGMA)}
    assert len(guesses) > 20


def test_more_cores_are_faster():
    one, few, many = (step_seconds(generic_cpu(cores, 32e9)) for cores in (1, 4, 16))
    assert many < few < one


def test_one_core_is_enough():
    profile = generic_cpu(1, 8e9)
    assert profile.host_threads == profile.host.cores == 1


def test_an_emulated_link_can_take_the_place_of_the_memorys():
    profile = generic_cpu(2, 8e9)
    slow = profile.with_values({"link.d2h": 50e6, "link.h2d": 50e6})
    assert step_seconds(slow) > 1.3 * step_seconds(profile)


def test_a_generic_gpu_is_a_machine_with_one():
    profile = generic_gpu()
    assert isinstance(profile, HardwareProfile)
    assert not profile.device.is_cpu
    assert 0 < step_seconds(profile) < step_seconds(generic_cpu(16, 32e9))


@pytest.mark.parametrize(("cores", "memory"), [(0, 8e9), (-2, 8e9), (2, 0.0), (2, -1.0)])
def test_a_machine_without_cores_or_memory_is_refused(cores, memory):
    with pytest.raises(ConfigError):
        generic_cpu(cores, memory)
