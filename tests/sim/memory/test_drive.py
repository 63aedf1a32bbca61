"""Memory of an engine whose states are on a drive: its own plan, to the byte."""

from dataclasses import replace

import pytest

from sim.hardware.catalog import find_machine, find_nvme
from sim.memory.engine import engine_memory
from sim.memory.need import memory_of
from sim.memory.saved import checkpoint_bytes
from sim.simulate import Strategy
from tests.models import TinyStack
from tests.sim.memory.test_need import llama_7b, parts_of
from zenflow import ZenFlowAdamW
from zenflow.config import ZenFlowConfig
from zenflow.rule.sizes import EXTENT_ELEMENTS, NUM_BUFFERS

CONFIGS = {
    "as by default": {},
    "compact": {"host_state": "compact"},
    "compact, odd rows": {"host_state": "compact", "min_split_elements": 16},
    "factored": {"second_moment": "factored", "host_state": "compact"},
    "small blocks": {"block_elements": 300, "min_split_elements": 16},
    "8-bit gradients, a short queue": {"gradient_link": "e4m3", "queue_depth": 2},
    "all on the device": {"topk_ratio": 1},
}


@pytest.mark.parametrize("most", [60, EXTENT_ELEMENTS])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_engines_memory_is_its_own_plan_to_the_byte(name, most, state_dir, monkeypatch):
    for module in ("zenflow.drive.extents", "sim.timing.drive_memory"):
        monkeypatch.setattr(f"{module}.EXTENT_ELEMENTS", most)
    config = ZenFlowConfig(**{"topk_ratio": 0, **CONFIGS[name]})
    model = TinyStack(num_layers=4, width=384 if most > 60 else 31 + len(name))
    optimizer = ZenFlowAdamW(
        model.parameters(), config=config, offload_gradients="keep", state_dir=state_dir
    )
    planned = optimizer.memory
    optimizer.close()
    shapes = [tuple(p.shape) for p in model.parameters()]
    found = engine_memory(shapes, config, 4, on_drive=True)
    assert found.plan(has_ring=False) == planned
    assert planned.buffer_bytes == found.host.drive.num_buffers * found.host.drive.largest


def test_states_leave_the_host_and_buffers_come():
    hardware = replace(find_machine("rtx4090-desktop"), nvme=find_nvme("gen4-desktop"))
    in_memory, on_drive = (
        memory_of(llama_7b(), Strategy.of("zenflow", topk_ratio=0, queue_depth=4, **own), hardware)
        for own in ({}, {"state_on_drive": True})
    )
    states = parts_of(in_memory, "pageable")["optimizer state"]
    buffers = parts_of(on_drive, "pageable")["drive buffers"]
    assert buffers <= NUM_BUFFERS * 12 * 2**20
    assert in_memory.host_bytes - on_drive.host_bytes == states - buffers
    assert on_drive.nvme_bytes == pytest.approx(2 * states, rel=1e-3)
    assert on_drive.short_of(replace(hardware, nvme=None)).keys() >= {"nvme"}


def test_a_checkpoint_copies_no_state():
    shapes = [(1024, 1024)] * 4
    whole, rest = (
        engine_memory(shapes, ZenFlowConfig(topk_ratio=0), 2, on_drive=own)
        for own in (False, True)
    )
    assert checkpoint_bytes(whole) - checkpoint_bytes(rest) == 12 * 4 * 1024**2
