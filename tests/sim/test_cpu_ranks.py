"""Several ranks on the cores of one CPU, each of which plays a device, over gloo."""

from dataclasses import replace

import pytest

from sim.hardware.components import Fabric
from sim.hardware.quantity import Quantity
from sim.machine import Machine
from sim.simulate import Strategy, simulate
from sim.timing.phases import costs_of_phases

LAYERS, PARAMS = 10, 10_000_000
FORWARD, BACKWARD = 10.0, 20.0
BANDWIDTH, LATENCY = 4e6, 0.1
"""Bytes/s and seconds of a collective, such that both show."""
SHARING = 1.5
"""What two busy cores do of what each does alone."""


def costs(ranks):
    found = costs_of_phases(
        forward=FORWARD, backward=BACKWARD, d2h=1e-9, update=1e-9, h2d=1e-9,
        num_params=PARAMS, num_layers=LAYERS,
    )  # fmt: skip
    own = found.hardware
    fabric = Fabric(
        name="gloo", bandwidth=Quantity(value=BANDWIDTH), latency=Quantity(value=LATENCY)
    )
    hardware = replace(
        own,
        device=replace(own.device, is_cpu=True),
        host=replace(own.host, cores=2, core_sharing=Quantity(value=SHARING)),
        num_devices=ranks,
        fabric=fabric,
    )
    return replace(found, hardware=hardware)


def test_busy_ranks_share_the_cores():
    """Alone a rank computes at its full speed; two have as much of the cores as both can do."""
    alone, shared = (
        simulate(costs(count), Strategy.of("on_device")).busy_seconds["device"] for count in (1, 2)
    )
    assert alone == pytest.approx(FORWARD + BACKWARD)
    reduced = 2 * PARAMS * 2 / 2 / BANDWIDTH  # works on the same core, beside backward
    assert shared >= (FORWARD + BACKWARD) / (SHARING / 2)
    assert shared <= (FORWARD + BACKWARD + reduced) / (SHARING / 2)


def test_a_cpu_waits_for_what_sharded_layers_need():
    """All of a step is in turn: compute, all-gathers, and reduce-scatters as all-reduces."""
    found = simulate(costs(2), Strategy.of("fsdp2"))
    model = 2 * PARAMS / 2  # bytes that one rank sends in an all-gather of all layers
    gathered = (2 - 1 / LAYERS) * model  # the last layer stays from forward to backward
    calls = 3 * LAYERS - 1
    work = FORWARD + BACKWARD + (gathered + 2 * model) / BANDWIDTH
    expected = calls * LATENCY + work / (SHARING / 2)
    assert found.step_seconds == pytest.approx(expected, rel=1e-6)
    assert found.stall_seconds == pytest.approx(0.0, abs=1e-6)
    assert found.fabric_bytes == 0  # they are the device's own work


def test_a_collective_is_work_of_the_ranks_core():
    """Beside compute that keeps it busy each of them gets half."""
    hardware = costs(2).hardware
    machine = Machine(hardware)
    started = machine.env.event()
    started.succeed()
    machine.compute("backward", 100.0, 1)
    done = machine.collective("reduce", 2 * BANDWIDTH, 1, started)
    machine.env.run(until=done)
    assert machine.env.now == pytest.approx(LATENCY + 2 / (SHARING / 2))
