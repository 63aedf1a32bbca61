"""A plan lets layers visit a device that nothing else fits."""

from dataclasses import replace

import pytest

from sim.hardware.catalog import find_machine
from sim.memory.chance import LIKELY
from sim.models.table import find_model
from sim.models.workload import Workload
from sim.planning.options import Planner
from sim.planning.plan import plan
from sim.planning.streams import with_streams

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
    assert found.shown is None
    option = found.streamed
    assert option.fits
    assert option.chance >= LIKELY
    assert option.need.workload.checkpointing is True
    assert option.need.workload.loss == "chunks"
    assert option.need.workload.tokens_per_step == found.workload.tokens_per_step
    assert option.prediction.step_seconds < float("inf")
    assert found.to_dict()["streamed"]["streams"]["resident_layers"] > 0
    assert option.label.startswith("zenflow, topk_ratio=0, stream, resident_layers=")


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
