"""A share of layers that are recomputed: which they are, and what time and memory they take."""

from dataclasses import replace

import pytest

from sim.hardware.catalog import find_machine
from sim.memory.moments import fullest
from sim.memory.need import memory_of
from sim.memory_parts import DeviceParts
from sim.models.activations import Activations
from sim.models.table import find_model
from sim.models.workload import Workload
from sim.planning.options import variants
from sim.schedules.systems.lora import Lora
from sim.simulate import Strategy
from sim.timing.costs import costs_of
from zenflow.errors import ConfigError

LAYERS = 32


def llama(share, **settings):
    model = find_model("llama-2-7b")
    return Workload.of_config(*model, checkpointing=share, sequence=512, **settings)


def near(value):
    return pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize(
    ("share", "numbers"),
    [
        (1, range(LAYERS)),
        (True, range(LAYERS)),
        (0, ()),
        (False, ()),
        (1 / 2, range(1, LAYERS, 2)),  # torchtitan counts layers, and takes every n-th
        (1 / 3, range(2, LAYERS, 3)),
        (3 / 32, (10, 21, 31)),
        (0.01, ()),
    ],
)
def test_layers_that_are_recomputed_are_spread_evenly(share, numbers):
    found = llama(share).recomputed
    assert found[0] is found[-1] is False  # table and output layer
    assert [index for index, again in enumerate(found[1:-1]) if again] == list(numbers)


@pytest.mark.parametrize("count", range(1, 50))
def test_a_fraction_is_as_many_layers_as_it_says(count):
    _, config = find_model("llama-2-7b")
    for layers in (count, 49, 80):
        work = Workload.of_config("own", {**config, "num_hidden_layers": layers})
        work = replace(work, checkpointing=min(1.0, count / layers))
        assert sum(work.recomputed) == min(count, layers)


@pytest.mark.parametrize("count", [0, 1, 5, 16, 20, 31, 32])
@pytest.mark.parametrize("schedule", ["full", "lora"])
def test_time_is_linear_in_the_layers(count, schedule):
    machine = find_machine("dgx-a100-80", 1)

    def seconds(share):
        costs = costs_of(llama(share), machine)
        if schedule == "lora":
            from sim.machine import Machine

            costs = Lora(Machine(machine), costs).costs
        launching = sum(segment.launching[1] for segment in costs.segments)
        return costs.forward_seconds, costs.backward_seconds, launching

    none, some, every = (seconds(share) for share in (0, count / LAYERS, 1))
    assert none[0] == some[0] == every[0]
    for before, found, after in zip(none[1:], some[1:], every[1:], strict=True):
        assert found == near(before + count / LAYERS * (after - before))


@pytest.mark.parametrize("count", [1, 5, 16, 20, 31])
def test_activations_are_linear_in_the_layers(count):
    none, some, every = (
        sum(Activations(llama(share)).kept_bytes()) for share in (0, count / LAYERS, 1)
    )
    assert some == near(none + count / LAYERS * (every - none))


@pytest.mark.parametrize("count", [1, 5, 16, 20])
@pytest.mark.parametrize("name", ["fsdp2", "lora"])
def test_memory_is_linear_in_the_layers_beside_the_one_at_work(count, name):
    # No logits, so that a device is fullest in backward.
    def activations(share):
        work = llama(share, batch_size=16, kernels="liger", loss="classes")
        need = memory_of(work, Strategy.of(name), find_machine("dgx-a100-80", 8))
        own = {part.name: part.num_bytes for part in need.parts if part.place == "device"}
        assert need.moment == "start of backward"
        return own["activations"], own.get("recomputed layer", 0.0)

    none, some, other = (activations(share) for share in (0, count / LAYERS, 1 / LAYERS))
    each = none[0] - other[0]
    assert some[0] == near(none[0] - count * each)
    assert none[1] == 0.0
    assert some[1] == other[1] == near(each)  # what it keeps for itself, without its input


def test_at_backwards_end_there_is_one_layer_that_was_recomputed():
    device = DeviceParts(always=(), in_flight=0.0, gradients_after=1e15)
    found = {}
    for share in (0, 1 / 2, 1):
        moment, parts = fullest(llama(share), device)
        assert moment == "end of backward"
        found[share] = {part.name: part.num_bytes for part in parts}
    assert found[1 / 2] == found[1]
    whole = Activations(llama(0)).kept_bytes()[1]
    assert found[0]["activations"] == found[1]["recomputed layer"] == whole
    assert found[1]["activations"] == 512 * 2 * 4096


@pytest.mark.parametrize("count", [0, 16, 20, 32])
def test_what_a_strategy_keeps_besides_is_of_layers_that_are_not_recomputed(count):
    work, change = llama(count / LAYERS, kernels="liger", loss="classes"), 3e9
    kept = Activations(work).kept_bytes()[:-1]
    for after, moment, held in (
        (0.0, "start of backward", sum(kept) + (LAYERS - count) * change),
        (1e15, "end of backward", 512 * 2 * 4096 if count else kept[1] + change),
    ):
        device = DeviceParts(
            always=(), in_flight=0.0, gradients_after=after, layer_activations=change
        )
        found, parts = fullest(work, device)
        own = {part.name: part.num_bytes for part in parts}
        again = Activations(work).recomputed_bytes() + change if count else 0.0
        assert (found, own["activations"]) == (moment, near(held))
        assert own["recomputed layer"] == near(again)


@pytest.mark.parametrize("share", [-0.1, 2, 1.5, "1/2", None])
def test_what_is_no_share_is_refused(share):
    with pytest.raises(ConfigError, match=r"checkpointing must be a share.*every second.*1/2"):
        llama(share)


def test_what_recomputes_a_part_can_recompute_all_of_it():
    changes = [text for _, text in variants(llama(1 / 2))]
    assert changes[:2] == [(), ("checkpointing",)]
    assert ("checkpointing",) not in [text for _, text in variants(llama(1))]
    desktop = find_machine("rtx4090-desktop")
    work = llama(1 / 2, batch_size=64)
    (device, *_) = memory_of(work, "zenflow", desktop).fits(desktop)
    assert any("activation checkpointing" in remedy for remedy in device.remedies)
