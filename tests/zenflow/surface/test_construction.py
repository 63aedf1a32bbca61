"""What making an optimizer sets up: threads, memory, the order of the host's tasks."""

import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.models import TINY, TinyStack, closing
from zenflow import ZenFlowAdamW, ZenFlowConfig
from zenflow.device.cpu import CpuDevice
from zenflow.host import memory as host_memory
from zenflow.lanes.completion import Completion
from zenflow.lanes.copies import Copy, CopyLane
from zenflow.step import engine
from zenflow.step.exact_tasks import ExactTasks
from zenflow.surface import assembly
from zenflow.trace.recorder import Recorder

CONFIG = ZenFlowConfig(update_interval=2, topk_ratio=0.3, block_elements=20, **TINY)


def take_steps(model, optimizer, count):
    for step in range(count):
        model.loss(step).backward()
        optimizer.step()


# ---- threads ------------------------------------------------------------------------------------


def test_every_thread_binds_itself_to_the_device_before_it_works(monkeypatch):
    """A new thread of CUDA stands on GPU 0, whichever GPU is trained on."""
    entered = {}

    class Device(CpuDevice):
        def enter_thread(self, lane=None):
            entered[threading.current_thread().name] = lane

    monkeypatch.setattr(assembly, "CpuDevice", Device)
    model = TinyStack()
    with closing(ZenFlowAdamW(model.parameters(), config=CONFIG, host_threads=3)) as optimizer:
        take_steps(model, optimizer, 4)
        ours = {t.name for t in threading.enumerate() if t.name.startswith("zenflow-")}
    assert ours == set(entered)
    assert {lane: name for name, lane in entered.items() if lane} == {
        "d2h": "zenflow-d2h",
        "h2d": "zenflow-h2d",
    }


def test_the_thread_that_sees_copies_end_binds_itself_too():
    """It runs where copies are only launched, on a GPU."""
    entered, event = [], SimpleNamespace(synchronize=lambda: None)
    lane = CopyLane(
        "d2h",
        "grads",
        Recorder(0, float),
        bytes_per_second=None,
        wait_timeout=5.0,
        enter_thread=lambda lane: entered.append((threading.current_thread().name, lane)),
    )
    copied, passed = Completion("a copy"), threading.Event()
    copied.when_done(passed.set)
    lane.submit(Copy(lambda: (event, event), [], copied, num_bytes=1, step=1))
    assert passed.wait(5.0)
    lane.close()
    assert entered == [("zenflow-d2h", "d2h"), ("zenflow-d2h-end", None)]


# ---- memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_grad_norm", ["keep", 1.0])
def test_no_step_allocates_memory_for_uploads(monkeypatch, max_grad_norm):
    """On a GPU it is pinned, which takes tenths of a second."""
    model = TinyStack()
    with closing(
        ZenFlowAdamW(model.parameters(), config=CONFIG, max_grad_norm=max_grad_norm)
    ) as optimizer:

        def refuse(*_):
            raise AssertionError("a step allocates")

        monkeypatch.setattr(CpuDevice, "upload_memory", refuse)
        take_steps(model, optimizer, 12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
@pytest.mark.parametrize("num_bytes", [0, 4096, 5 << 20])
def test_host_memory_is_zeroed_and_writable(num_bytes, dtype):
    memory = host_memory.zeroed(num_bytes // dtype.itemsize, dtype)
    assert (memory.dtype, memory.nbytes) == (dtype, num_bytes)
    assert not memory.any()
    memory.fill_(3)
    assert (memory == 3).all()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("forks", [True, False])
def test_a_large_slab_has_pages_of_its_own_that_a_fork_may_be_kept_from(forks):
    memory = host_memory.zeroed(8 << 20, torch.uint8, forks=forks)
    assert memory.data_ptr() % 4096 == 0
    flags = _flags_at(memory.data_ptr())
    assert ("dc" in flags) == (not forks)  # "don't copy on fork"
    if Path("/sys/kernel/mm/transparent_hugepage").is_dir():
        assert "hg" in flags


def _flags_at(address):
    """Return the kernel's flags of the mapping that holds an address."""
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_inside = int(found[1], 16) <= address < int(found[2], 16)
        elif is_inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError("no mapping holds it")


@pytest.mark.parametrize("broken", ["_make_buckets", "HostPool"])
def test_a_failed_construction_gives_the_devices_memory_back(monkeypatch, broken):
    closed = []

    def fail(*_):
        raise MemoryError("no more")

    def close(self):
        closed.append(self)

    monkeypatch.setattr(CpuDevice, "close", close)
    if broken == "HostPool":
        monkeypatch.setattr(engine.HostPool, "open", fail)
    else:
        monkeypatch.setattr("zenflow.columns.placement._make_buckets", fail)
    with pytest.raises(MemoryError, match="no more"):
        ZenFlowAdamW(TinyStack().parameters(), config=CONFIG)
    assert len(closed) == 1


# ---- the host's tasks ---------------------------------------------------------------------------


def test_tasks_are_queued_bucket_by_bucket_in_the_order_of_backward(monkeypatch):
    """A bucket's staging is then free in the order in which the next backward needs it."""
    queued, take_in, update = [], ExactTasks.take_in, ExactTasks.update

    def noting_take_in(self, step, bucket, due):
        queued.append(("take in", bucket.index))
        return take_in(self, step, bucket, due)

    def noting_update(self, step, blocks, active, opened):
        queued.extend(("update", block.split.bucket) for block in blocks[:1])
        return update(self, step, blocks, active, opened)

    monkeypatch.setattr(ExactTasks, "take_in", noting_take_in)
    monkeypatch.setattr(ExactTasks, "update", noting_update)
    config = ZenFlowConfig(
        update_interval=2, topk_ratio=0.3, min_split_elements=1, select_interval=0
    )
    model = TinyStack(num_layers=6, width=220)  # too large to share a bucket
    with closing(ZenFlowAdamW(model.parameters(), config=config)) as optimizer:
        take_steps(model, optimizer, 4)
        queued.clear()
        take_steps(model, optimizer, 1)
        num_buckets = len(optimizer._engine.layout.buckets)
    buckets = [bucket for _, bucket in queued]
    assert num_buckets > 2
    assert buckets == sorted(buckets)
    assert {kind for kind, _ in queued} == {"take in", "update"}
