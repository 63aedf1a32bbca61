"""The simulated backend: the simulator's figures under the objective's names."""

import pickle
from dataclasses import replace

import pytest

from autotune.efficiency import EnergyCurve
from autotune.offline.backends import SimulatedBackend
from sim.hardware.catalog import find_machine
from sim.memory.need import memory_of
from sim.models.table import find_model
from sim.models.workload import Workload
from sim.simulate import Strategy, simulate
from sim.timing.costs import costs_of
from zenflow.config import ZenFlowConfig
from zenflow.knobs import Knobs

WORK = Workload.of_config(*find_model("qwen2.5-0.5b"), batch_size=2, sequence=256)
MACHINE = find_machine("rtx4090-desktop")
KNOBS = Knobs(topk_ratio=0.2, update_interval=2, select_interval=50)


def test_figures_are_those_of_simulation_and_memory():
    done = SimulatedBackend(WORK, MACHINE).measure(KNOBS)
    strategy = Strategy.of("zenflow", topk_ratio=0.2, update_interval=2, select_interval=50)
    prediction = simulate(costs_of(WORK, MACHINE), strategy)
    memory = memory_of(WORK, strategy, MACHINE)
    assert done.step_seconds == pytest.approx(prediction.step_seconds, rel=1e-9)
    assert done.stall_seconds == pytest.approx(prediction.stall_seconds, rel=1e-9)
    assert (done.device_bytes, done.host_bytes) == (memory.device_bytes, memory.host_bytes)
    assert done.staleness == 3
    assert done.tokens_per_step == 2 * 256
    assert done.captured == EnergyCurve.default().captured(0.2)


def test_what_is_known_without_a_run_is_what_the_run_has():
    backend = SimulatedBackend(WORK, MACHINE, curve=EnergyCurve.of({0.2: 0.6}))
    assert backend.need(KNOBS) == backend.measure(KNOBS).need
    assert backend.need(KNOBS).captured == 0.6


def test_what_is_no_knob_stays_as_it_was_given():
    base = ZenFlowConfig(queue_depth=1, topk_ratio=0.3)
    backend = SimulatedBackend(WORK, MACHINE, base=base)
    assert backend.default.topk_ratio == 0.3
    assert backend.need(KNOBS).host_bytes < SimulatedBackend(WORK, MACHINE).need(KNOBS).host_bytes


def test_a_worker_process_gets_the_same_backend():
    backend = SimulatedBackend(WORK, MACHINE, releases=False, curve=EnergyCurve.of({0.5: 0.9}))
    backend.measure(KNOBS)
    copy = pickle.loads(pickle.dumps(backend))
    assert copy.measure(KNOBS) == backend.measure(KNOBS)
    assert copy.describe() == backend.describe()


@pytest.mark.parametrize(
    "other",
    [
        SimulatedBackend(replace(WORK, batch_size=4), MACHINE),
        SimulatedBackend(WORK, MACHINE.with_values({"host.dram": 1e9})),
        SimulatedBackend(WORK, MACHINE, curve=EnergyCurve.of({0.5: 0.9})),
        SimulatedBackend(WORK, MACHINE, base=ZenFlowConfig(hysteresis=0.2)),
        SimulatedBackend(WORK, MACHINE, releases=False),
    ],
)
def test_whatever_decides_figures_is_in_the_description(other):
    assert other.describe() != SimulatedBackend(WORK, MACHINE).describe()
