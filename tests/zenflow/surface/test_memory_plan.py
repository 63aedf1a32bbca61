"""Memory: planned before training, kept to, within bounds per parameter, and not growing."""

import gc
import itertools
import sys
import threading
import tracemalloc

import psutil
import pytest
import torch
from torch import nn

from tests.models import TINY, TinyStack, closing
from tests.zenflow.decisions import intervals
from zenflow import LoggedDecisions, ZenFlowAdamW, ZenFlowConfig

WIDTH = 384


def make_model(dtype):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8))).to(dtype)


def take_step(model, optimizer, step, width=WIDTH):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(4, width, generator=generator).to(next(model.parameters()))
    model(x).float().square().mean().backward()
    optimizer.step()


def live_storages():
    """Return all storages that Python can reach; who holds them keeps other tests' from going."""
    gc.collect()
    storages = {}
    for candidate in gc.get_objects():
        # Plain tensors only: isinstance() would wake lazy objects and find those of torch.compile.
        if type(candidate) in (torch.Tensor, nn.Parameter):
            storage = candidate.untyped_storage()
            storages[storage._cdata] = storage
    return storages


def live_tensor_bytes():
    """Return the bytes of all storages that Python can reach."""
    return bytes_since({})


def bytes_since(before):
    """Return the bytes of the storages that have come since."""
    now = live_storages()
    return sum(storage.nbytes() for key, storage in now.items() if key not in before)


CONFIGS = {
    "zenflow": ZenFlowConfig(),
    "zenflow_paper": ZenFlowConfig.preset("zenflow_paper"),
    "zero_offload": ZenFlowConfig.preset("zero_offload"),
    "delayed": ZenFlowConfig.preset("delayed"),
    "on_device": ZenFlowConfig.preset("on_device"),
    "warm-up": ZenFlowConfig(full_warm_up_rounds=4),
    "no overlap": ZenFlowConfig(overlap_step=False),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in CONFIGS),
        ("zenflow", torch.bfloat16),
        *(pytest.param(name, torch.bfloat16, marks=pytest.mark.slow)
          for name in CONFIGS if name != "zenflow"),
    ],
)  # fmt: skip
def test_what_is_allocated_is_what_was_planned(name, dtype):
    model = make_model(dtype)
    for step in range(2):  # allocates what the model itself needs
        take_step(model, torch.optim.SGD(model.parameters(), lr=0.0), step)
        model.zero_grad()
    before = live_storages()
    optimizer = ZenFlowAdamW(
        model.parameters(), config=CONFIGS[name], offload_gradients="release", max_grad_norm=1.0
    )
    with closing(optimizer):
        plan = optimizer.memory
        for step in range(9):
            take_step(model, optimizer, step)
        optimizer.synchronize()
        actual = bytes_since(before)
    planned = plan.host_bytes + plan.device_extra_bytes
    assert actual <= 1.01 * (planned + plan.device_ring_bytes)
    assert actual >= 0.9 * planned
    assert plan.num_params == sum(p.numel() for p in model.parameters())
    assert plan.model_bytes == sum(p.nbytes for p in model.parameters())
    assert 0 <= plan.pinned_bytes <= plan.host_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_default_takes_few_host_bytes_per_parameter(dtype):
    """Three float32 numbers, one gradient staged and 1.6 on average that wait, and an upload."""
    model = make_model(dtype)
    with closing(ZenFlowAdamW(model.parameters())) as optimizer:
        assert optimizer.config == ZenFlowConfig()
        plan = optimizer.memory
        most = 12 + dtype.itemsize * (1 + 1.575 + 1 / 4)
        assert 0.85 * most <= plan.host_bytes_per_param <= most
        assert plan.host_bytes_per_param == plan.host_bytes / plan.num_params


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_lands_at_once_takes_no_host_memory_of_its_own(dtype):
    def planned(**changes):
        config = ZenFlowConfig(**changes)
        with closing(ZenFlowAdamW(make_model(dtype).parameters(), config=config)) as optimizer:
            return optimizer.memory.host_bytes

    assert planned(full_warm_up_rounds=60) == planned()
    assert planned(overlap_step=False) < planned()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.3])
def test_the_device_takes_12_bytes_per_important_element_and_bounded_rings(ratio, dtype):
    model = make_model(dtype)
    config = ZenFlowConfig(topk_ratio=ratio)
    with closing(ZenFlowAdamW(model.parameters(), config=config)) as optimizer:
        plan = optimizer.memory
    resident = plan.num_params - plan.split_params
    important = ratio * plan.split_params + resident
    # Vectors of one entry per column or row come on top; a block's count is rounded.
    slack = 12 * 8 * WIDTH + 96 * 8 * WIDTH
    assert plan.device_extra_bytes <= 12 * important * 1.02 + slack
    assert plan.device_ring_bytes <= 4 * max(p.nbytes for p in model.parameters())


def test_the_plan_reads_as_a_table():
    with closing(ZenFlowAdamW(make_model(torch.bfloat16).parameters())) as optimizer:
        text = str(optimizer.memory)
    assert "per parameter" in text
    assert all(word in text for word in ("model", "host", "pinned", "device"))


def sizes(optimizer):
    """Return what might grow: objects, memory, threads, and the optimizer's own containers."""
    gc.collect()
    objects = gc.get_objects()
    return {
        "objects": len(objects),
        "tensors": sum(issubclass(type(o), torch.Tensor) for o in objects),
        "blocks": sys.getallocatedblocks(),
        "bytes": tracemalloc.get_traced_memory()[0],
        "resident": psutil.Process().memory_info().rss,
        "threads": threading.active_count(),
        "spans": len(optimizer.timeline.spans),
        "decisions": len(optimizer.decision_log),
    }


NUM_STEPS = 40
LIMITS = {
    "objects": NUM_STEPS,
    "tensors": 5,
    "blocks": NUM_STEPS,
    "bytes": 25e3,
    "resident": 4e6,
    "threads": 1,
    "spans": 10,
    "decisions": 1,
}
"""Growth over that many steps from which on something grows; most are one a step."""


@pytest.mark.parametrize("mode", [pytest.param("keep", marks=pytest.mark.slow), "release"])
def test_nothing_grows_over_hundreds_of_steps(mode):
    """What grows does so in every span of steps; a cache that fills, or another thread, does not.

    Traced bytes creep up for long, by less and less: Python's free lists exchange what was there
    before the trace began.
    """
    model = TinyStack(num_layers=3, width=8)
    config = ZenFlowConfig(
        topk_ratio=0.25, select_interval=7, block_elements=32, importance_decay=0.5, **TINY
    )
    settings = {"max_grad_norm": 1.0, "offload_gradients": mode} if mode == "release" else {}
    optimizer = ZenFlowAdamW(model.parameters(), config=config, timeline_steps=5, **settings)
    tracemalloc.start()
    try:
        with closing(optimizer):
            measured = []
            for _ in range(5):
                for step in range(NUM_STEPS):
                    model.loss(step).backward()
                    optimizer.step()
                optimizer.synchronize()
                measured.append(sizes(optimizer))
    finally:
        tracemalloc.stop()
    growth = {
        what: [after[what] - before[what] for before, after in itertools.pairwise(measured)]
        for what in LIMITS
    }
    assert {w: g for w, g in growth.items() if min(g) >= LIMITS[w]} == {}
    assert measured[-1]["decisions"] == 0
    assert measured[-1]["threads"] == measured[0]["threads"]


def test_changes_of_the_interval_do_not_make_memory_grow():
    model = make_model(torch.bfloat16)
    log = intervals(ZenFlowConfig(), [(step, 1 + step % 4) for step in range(3, 60, 3)])
    optimizer = ZenFlowAdamW(model.parameters(), controller=LoggedDecisions(log))
    with closing(optimizer):
        for step in range(30):
            take_step(model, optimizer, step)
        optimizer.synchronize()
        middle = live_tensor_bytes()
        for step in range(30, 66):
            take_step(model, optimizer, step)
        optimizer.synchronize()
        assert live_tensor_bytes() <= 1.05 * middle
        assert optimizer.decision_log == log[1:]  # the first decision is the S of the start


def test_a_dropped_optimizer_leaves_no_thread_and_no_memory():
    threads = threading.active_count()
    model = make_model(torch.bfloat16)
    before = live_tensor_bytes()
    optimizer = ZenFlowAdamW(model.parameters(), offload_gradients="release", max_grad_norm=1.0)
    for step in range(3):
        take_step(model, optimizer, step)
    assert threading.active_count() > threads
    assert sys.getrefcount(optimizer) >= 1
    del optimizer  # without close(): collected with its threads, and its hooks do nothing
    gc.collect()
    assert threading.active_count() == threads
    assert live_tensor_bytes() <= before + 1_000_000
