"""What making an optimizer sets up: threads, memory, the order of the host's tasks."""

import re
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.models import TINY, TinyStack, closing
from tests.zenflow.decisions import decisions
from zenflow import LoggedDecisions, ZenFlowAdamW, ZenFlowConfig
from zenflow.device.cpu import CpuDevice
from zenflow.host import memory as host_memory
from zenflow.lanes.completion import Completion
from zenflow.lanes.copies import Copy, CopyLane
from zenflow.step.host.exact import ExactTasks
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
        wait_timeout=5.0,
        enter_thread=lambda lane: entered.append((threading.current_thread().name, lane)),
    )
    lane.start()
    copied, passed = Completion("a copy"), threading.Event()
    copied.when_done(passed.set)
    lane.submit(Copy(lambda: (event, event), [], copied, num_bytes=1, step=1))
    assert passed.wait(5.0)
    lane.close()
    assert entered == [("zenflow-d2h", "d2h"), ("zenflow-d2h-end", None)]


# ---- memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["keep", "release"])
def test_no_step_allocates_memory_for_uploads(monkeypatch, mode):
    """On a GPU it is pinned, which takes tenths of a second."""
    model = TinyStack()
    with closing(
        ZenFlowAdamW(model.parameters(), config=CONFIG, offload_gradients=mode)
    ) as optimizer:

        def refuse(*_):
            raise AssertionError("a step allocates")

        monkeypatch.setattr(CpuDevice, "pinned_slab", refuse)
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


def note_closing(monkeypatch, closed):
    def close(self):
        closed.append(self)

    monkeypatch.setattr(CpuDevice, "close", close)


BREAKS = {
    "the layout": "zenflow.columns.placement._make_buckets",
    "a bank": "zenflow.columns.device_rows.Bank.allocate",
    "a lane": "zenflow.step.engine.CopyLane.__init__",
    "the pool": "zenflow.step.engine.HostPool.open",
    "the worker": "zenflow.step.engine.HostWorker.start",
    "upload buffers": "zenflow.step.engine.UploadPool.__init__",
    "the queue": "zenflow.step.host.rules.RoomPool.__init__",
    "fresh steps": "zenflow.step.engine.FreshSteps.__init__",
    "the collector": "zenflow.step.engine.GradientCollector.__init__",
    "the controller": "zenflow.controller.FixedInterval.attach",
}


@pytest.mark.parametrize("broken", BREAKS)
def test_a_failed_construction_leaves_neither_memory_nor_threads_behind(monkeypatch, broken):
    closed = []

    def fail(*_, **__):
        raise MemoryError("no more")

    note_closing(monkeypatch, closed)
    monkeypatch.setattr(BREAKS[broken], fail)
    before = set(threading.enumerate())
    model = TinyStack()
    with pytest.raises(MemoryError) as caught:
        ZenFlowAdamW(
            model.parameters(), config=CONFIG, offload_gradients="release", host_threads=3
        )
    assert str(caught.value.__cause__) == "no more"
    assert len(closed) == 1
    assert set(threading.enumerate()) <= before
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())


@pytest.mark.parametrize("inside", ["a copy", "a host task"])
def test_an_optimizer_may_be_closed_by_one_of_its_own_threads(monkeypatch, inside):
    """The garbage collector runs in any of them."""
    model = TinyStack()
    closed, errors = [], []
    note_closing(monkeypatch, closed)
    optimizer = ZenFlowAdamW(model.parameters(), config=CONFIG)
    engine = optimizer._engine

    def close(*_):
        try:
            engine.close()
        except RuntimeError as error:
            errors.append(error)

    done = Completion("the end")
    if inside == "a copy":
        engine.d2h.submit(Copy(close, [], done, num_bytes=1, step=1))
    else:
        engine.worker.submit("closing", [close], completion=done, deadline=1, step=1, after=[])
    done.wait_done(20.0)
    assert not errors
    assert len(closed) == 1
    optimizer.close()


def test_memory_for_uploads_is_given_back_when_a_window_needs_less(monkeypatch):
    """A change of k uploads everything at once; what that took is not kept for the long run."""
    taken = {}

    def pin(self, num_elements, dtype):
        slab = host_memory.zeroed(num_elements, dtype)
        taken[slab.data_ptr()] = slab
        return slab

    def free(self, slab):
        del taken[slab.data_ptr()]

    monkeypatch.setattr(CpuDevice, "pinned_slab", pin)
    monkeypatch.setattr(CpuDevice, "free_slab", free)
    model = TinyStack()
    config = replace(CONFIG, update_interval=8)
    log = LoggedDecisions(decisions(config, [(4, {"topk_ratio": 0.35})]))
    most = []
    with closing(ZenFlowAdamW(model.parameters(), config=config, controller=log)) as optimizer:
        for _ in range(20):
            take_steps(model, optimizer, 1)
            most.append(sum(slab.nbytes for slab in taken.values()))
        planned = optimizer.memory.pinned_bytes
    assert max(most) > 1.1 * most[0]
    assert planned <= most[-1] <= most[0]


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


# ---- what the system refuses --------------------------------------------------------------------


def our_threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("zenflow-")}


@pytest.mark.parametrize("num_given", range(4))
def test_without_more_threads_the_error_says_how_many_there_are_and_none_stays(
    monkeypatch, num_given
):
    before, start = our_threads(), threading.Thread.start
    left = [num_given]

    def refused(thread):
        if left[0] == 0:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(
        RuntimeError, match=r"no thread for zenflow-\S+, beside the \d+ .* fewer host_threads"
    ):
        ZenFlowAdamW(TinyStack().parameters(), config=CONFIG, host_threads=4)
    assert our_threads() == before


class Refused:
    """Stands for a source of memory that is used up after some calls."""

    def __init__(self, source, num_given, error):
        self.source, self.left, self.error = source, num_given, error

    def __call__(self, *arguments, **settings):
        if self.left == 0:
            raise self.error
        self.left -= 1
        return self.source(*arguments, **settings)


TORCHS = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")


@pytest.mark.parametrize("num_given", [0, 1, 3])
@pytest.mark.parametrize("error", [TORCHS, MemoryError(), OSError(12, "Cannot allocate memory")])
def test_without_more_memory_the_error_says_how_much_there_must_be(monkeypatch, num_given, error):
    before = our_threads()
    model = TinyStack()
    count = sum(param.numel() for param in model.parameters())
    zeroed = Refused(host_memory._zeroed, num_given, error)
    monkeypatch.setattr(host_memory, "_zeroed", zeroed)
    with pytest.raises(
        MemoryError, match=f"of {count:,} parameters .* {12 * count:,} bytes, .* leaves .* Free"
    ) as caught:
        ZenFlowAdamW(model.parameters(), config=CONFIG, host_threads=4)
    assert "bytes of host memory" in str(caught.value.__cause__)
    assert "state_dir and topk_ratio=0" in str(caught.value)
    assert our_threads() == before


def test_memory_of_torchs_that_is_refused_is_told_likewise(monkeypatch):
    model = TinyStack()
    monkeypatch.setattr(torch, "empty", Refused(torch.empty, 2, TORCHS))
    with pytest.raises(MemoryError, match="too little memory for the optimizer"):
        ZenFlowAdamW(model.parameters(), config=CONFIG)


def test_an_error_that_is_not_of_memory_stays_what_it_is(monkeypatch):
    zeroed = Refused(host_memory._zeroed, 1, RuntimeError("another"))
    monkeypatch.setattr(host_memory, "_zeroed", zeroed)
    with pytest.raises(RuntimeError, match=r"^another$"):
        ZenFlowAdamW(TinyStack().parameters(), config=CONFIG)


# ---- inference mode -----------------------------------------------------------------------------


def test_a_model_that_was_made_in_inference_mode_is_refused():
    before = our_threads()
    with torch.inference_mode():
        model = TinyStack()
    with pytest.raises(ValueError, match=r"parameter 0 was made under torch\.inference_mode\(\)"):
        ZenFlowAdamW(model.parameters(), config=CONFIG)
    assert our_threads() == before


def test_a_model_that_was_moved_in_inference_mode_is_refused_at_the_step():
    model = TinyStack()
    with closing(ZenFlowAdamW(model.parameters(), config=CONFIG)) as optimizer:
        take_steps(model, optimizer, 1)
        model.loss(1).backward()
        first = next(model.parameters())
        with torch.inference_mode():
            first.data = first.data.clone()
        with pytest.raises(RuntimeError, match=r"was made under torch\.inference_mode\(\)"):
            optimizer.step()


def test_an_optimizer_may_be_made_and_used_within_inference_mode():
    def train(mode):
        model = TinyStack()
        with mode():
            optimizer = ZenFlowAdamW(model.parameters(), config=CONFIG, max_grad_norm=1.0)
        with closing(optimizer):
            for step in range(9):
                model.loss(step).backward()
                with mode():
                    optimizer.step()
                with mode(), optimizer.true_weights():
                    saved = optimizer.state_dict()
                with mode():
                    optimizer.load_state_dict(saved)
            return [param.detach().clone() for param in model.parameters()]

    pairs = zip(train(torch.inference_mode), train(torch.no_grad), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
