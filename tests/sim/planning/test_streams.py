"""A plan lets layers visit a device that nothing else fits."""

from dataclasses import replace

import pytest

from sim.hardware.catalog import find_machine
from sim.memory.chance import LIKELY
from sim.models.table import find_model
from sim.models.workload import Workload
from sim.planning.options import Planner
from sim.planning.plan import plan
from sim.planning.streams import hiding_tokens, with_streams
from sim.simulate import simulate
from sim.timing.costs import costs_of

GIB = float(1 << 30)


def workload(model="qwen3-14b", **changes):
    given = {"batch_size": 4, "sequence": 1024, **changes}
    return Workload.of_config(*find_model(model), **given)


def machine(name="rtx4090-desktop", host=256):
    return find_machine(name, 1).with_values({"host.dram_bytes": host * GIB})


def planned(work, hardware, **changes):
    return plan(work, hardware, strategies=("zenflow", "zero_offload"), draws=0, **changes)


def test_a_model_of_more_than_the_card_gets_an_answer():
    found = planned(workload(), machine())
    assert found.needs_sharding
    option = found.streamed
    assert found.recommended is found.shown is option
    assert option.fits
    assert option.chance >= LIKELY
    assert option.need.workload.checkpointing is True
    assert option.need.workload.loss == "chunks"
    assert option.need.workload.tokens_per_step == found.workload.tokens_per_step
    assert option.prediction.step_seconds < float("inf")
    assert found.to_dict()["streamed"]["streams"]["resident_layers"] > 0
    assert option.label.startswith("zenflow, topk_ratio=0, stream, resident_layers=")


@pytest.mark.parametrize(("host", "state"), [(128, "float32"), (64, "compact")])
def test_eight_billion_on_24_gb_are_offered_a_step_that_is_likely_to_fit(host, state):
    found = planned(workload("llama-3.1-8b"), machine(host=host))
    assert found.recommended is found.streamed, "weights that stay leave too little room"
    assert found.likeliest.chance < LIKELY <= found.streamed.chance
    assert found.streamed.strategy.config.host_state == state
    assert found.streamed.need.workload.tokens_per_step == found.workload.tokens_per_step
    assert found.streamed.tokens_per_second > 1.5 * found.likeliest.tokens_per_second


def test_as_many_layers_stay_as_fit():
    hardware, work = machine(), workload()
    planner = Planner(hardware, reserve=GIB)
    option = with_streams(planner, work)
    one_more = option.strategy.streams.resident_layers + 1
    streams = type(option.strategy.streams)(resident_layers=one_more)
    need = planner.need(option.need.workload, replace(option.strategy, streams=streams))
    assert need.short_of(hardware, planner.reserve, planner.chance)


def test_compact_state_is_tried_where_the_host_has_too_little():
    option = with_streams(Planner(machine(host=190)), workload())
    assert "host_state=compact" in option.changes
    assert with_streams(Planner(machine(host=64)), workload()) is None


def test_windows_are_longer_where_the_host_has_too_little_for_uploads():
    """Eight billion parameters with a large vocabulary, on a desktop with 64 GiB."""
    planner, work = Planner(machine(host=64), reserve=GIB), workload("qwen3-8b", sequence=2048)
    option = with_streams(planner, work)
    assert option.fits
    assert option.chance >= LIKELY
    assert {"host_state=compact", "update_interval=16"} <= set(option.changes)
    assert with_streams(planner, work, knobs={"update_interval": 4}) is None


def test_weights_that_are_away_leave_a_card_to_activations():
    """A 7B model fits a card of 24 GB for one short sequence; streamed, for eight."""
    found = planned(workload("qwen2.5-7b", batch_size=8), machine(host=512))
    assert found.has_fewer_tokens
    assert found.streamed.fits
    assert found.streamed.need.workload.batch_size == 8
    assert found.streamed.tokens_per_second > 1.9 * found.shown.tokens_per_second
    layers = len(found.workload.layers)
    assert 0 < found.streamed.strategy.streams.resident_layers < layers


def test_streams_are_offered_only_where_they_win():
    planner = Planner(machine(host=512), reserve=GIB)
    work = workload("qwen2.5-7b", batch_size=8)
    alone = with_streams(planner, work)
    slower = replace(alone, prediction=replace(alone.prediction, step_seconds=9.0))
    assert with_streams(planner, work, before=slower) is not None
    assert with_streams(planner, work, before=alone) is None
    unsure = replace(alone, is_tight=True)
    assert with_streams(planner, work, before=unsure) is not None


def test_settings_that_are_held_are_held():
    knobs = {"gradient_link": "e4m3", "host_state": "compact"}
    option = with_streams(Planner(machine()), workload(), knobs=knobs, may_chunk=False)
    assert option.strategy.config.rounds_gradients
    assert option.strategy.config.is_compact
    assert option.need.workload.loss == "tokens"


def test_the_least_micro_batch_hides_visits():
    """With twice its tokens nothing is waited for, with half of them forward alone waits."""
    planner = Planner(machine(host=512), reserve=GIB)
    option = with_streams(planner, workload(batch_size=8))
    work = option.need.workload
    tokens = hiding_tokens(option.need, planner.costs(work))
    stalls = []
    for factor in (0.5, 2.0):
        resized = replace(work, batch_size=1, sequence=round(factor * tokens))
        done = simulate(costs_of(resized, planner.hardware), option.strategy)
        stalls.append(sum(s.seconds for s in done.timeline.spans if s.name == "stall:weights"))
    assert stalls[1] < 0.1 * stalls[0]


@pytest.mark.parametrize(
    ("work", "hardware"),
    [
        (workload("qwen2.5-0.5b"), machine()),  # which fits
        (workload(), find_machine("hgx-h100", 8)),  # shards
        (workload(), machine(host=64)),  # no room at home
    ],
)
def test_elsewhere_nothing_visits(work, hardware):
    assert planned(work, hardware).streamed is None


def test_inputs_wait_on_the_host_where_the_card_is_full_of_them():
    hardware = machine(host=512)
    option = with_streams(Planner(hardware, reserve=GIB), workload(batch_size=32))
    assert option.changes[-1] == "offload_activations"
    work = option.need.workload
    assert work.offloads_activations
    kept = replace(option.need.workload, offloads_activations=False)
    planner = Planner(hardware, reserve=GIB)
    streams = replace(option.strategy, streams=type(option.strategy.streams)())
    assert planner.need(kept, streams).short_of(hardware, planner.reserve, planner.chance)
    small = with_streams(planner, workload(batch_size=4))
    assert not small.need.workload.offloads_activations


def test_where_layers_keep_more_than_inputs_they_stay():
    option = with_streams(
        Planner(machine(host=512), reserve=GIB), workload(batch_size=32), checkpointing=False
    )
    assert option is None or not option.need.workload.offloads_activations
