"""A step of many micro-batches is what simulating all of them says."""

from dataclasses import replace

import pytest

from sim.hardware.catalog import clustered, find_machine
from sim.models.table import find_model
from sim.models.workload import Workload
from sim.planning.accumulated import accumulated
from sim.simulate import Strategy
from sim.steady import steady
from sim.timing.costs import costs_of

HOSTS = clustered(find_machine("hgx-h100"), 2, "8x-infiniband-hdr")
COUNT = 24


def predicted(machine, strategy, layers=4):
    name, config = find_model("llama-3.2-1b")
    small = {**config, "num_hidden_layers": layers}
    work = Workload.of_config(name, small, batch_size=1, sequence=256)

    def predict(count):
        costs = costs_of(replace(work, accumulation=count), machine)
        return steady(costs, strategy, num_steps=2)

    return predict


@pytest.mark.parametrize("name", ["zenflow", "zero_offload", "on_device"])
@pytest.mark.parametrize(
    ("machine", "parallel"),
    [(find_machine("rtx4090-server", 4), "ddp"), (find_machine("rtx4090-server", 4), "fsdp"),
     (HOSTS, "fsdp")],
    ids=["whole", "sharded", "hosts"],
)  # fmt: skip
def test_many_micro_batches_follow_from_few(name, machine, parallel):
    predict = predicted(machine, Strategy.of(name, parallel=parallel))
    every, few = predict(COUNT), accumulated(predict, COUNT, is_replayed=False)
    assert few.step_seconds == pytest.approx(every.step_seconds, rel=0.01)
    assert few.stall_seconds == pytest.approx(every.stall_seconds, abs=0.01 * every.step_seconds)
    assert few.d2h_bytes == pytest.approx(every.d2h_bytes)
    assert few.fabric_bytes == pytest.approx(every.fabric_bytes)
    for lane, seconds in every.busy_seconds.items():
        assert few.busy_seconds[lane] == pytest.approx(seconds, rel=0.02, abs=1e-4)


def test_a_host_that_keeps_the_device_waiting_has_time_with_more_micro_batches():
    slow = find_machine("rtx4090-desktop").with_values({"host.dram": 12e9})
    predict = predicted(slow, Strategy.of("zenflow"), layers=16)
    few, many = predict(6), accumulated(predict, 400, is_replayed=False)
    assert few.stall_fraction > 0.1
    assert many.stall_seconds == 0.0
    assert many.step_seconds == pytest.approx(predict(400).step_seconds, rel=0.05)


def test_few_micro_batches_are_simulated_as_they_are():
    predict = predicted(find_machine("rtx4090-desktop"), Strategy.of("zenflow"))
    assert accumulated(predict, 3, is_replayed=False) == predict(3)
