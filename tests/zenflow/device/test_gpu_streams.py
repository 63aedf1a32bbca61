"""What a GPU's streams may do: be late, and meet short memory. And no step waits unseen.

Batches are on the device and nothing inside a loop waits for it, so that the CPU is a step ahead
of the GPU as in training. The twins without a GPU are in `tests.zenflow.races`, where every order
that the engine allows is looked at.
"""

import random
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.models import TinyStack, assert_equal, closing, weights_of
from tests.zenflow.step.test_timing import RULES, config_of
from zenflow import ZenFlowAdamW, ZenFlowConfig
from zenflow.device.cuda import CudaDevice
from zenflow.device.runtime import CudaRuntime
from zenflow.surface import assembly

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MODES = ["keep", "release"]
NUM_STEPS = 40
LONGEST = 3_000_000
"""Cycles of the longest sleep, about two milliseconds."""


class Sleeper:
    """Lets a stream do nothing for a random time, often none."""

    def __init__(self, seed):
        self._draw = random.Random(seed)

    def sleep(self):
        if self._draw.random() < 0.5:
            torch.cuda._sleep(self._draw.randrange(LONGEST))


class LateCopies(CudaRuntime):
    """Copy streams that are late on the device, before and between their kernels."""

    def __init__(self, device):
        super().__init__(device)
        self._sleeper, self._streams = Sleeper(0), []

    def new_stream(self):
        self._streams.append(super().new_stream())
        return self._streams[-1]

    def _sleep_on(self, stream):
        if stream in self._streams:
            with torch.cuda.stream(stream):
                self._sleeper.sleep()

    def wait(self, stream, event):
        super().wait(stream, event)
        self._sleep_on(stream)

    def record(self, stream, *, is_timed=False):
        self._sleep_on(stream)
        return super().record(stream, is_timed=is_timed)


class LateBackward(torch.autograd.Function):
    """The identity, behind whose backward the compute stream is late."""

    @staticmethod
    def forward(ctx, x, sleeper):
        ctx.sleeper = sleeper
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.sleeper.sleep()
        return grad, None


class Stack(nn.Module):
    """Many tiny layers, with batches that are on the device already."""

    def __init__(self, device, *, num_layers=12, width=6, sleeper=None):
        super().__init__()
        self.stack = TinyStack(num_layers, width).to(device)
        self.sleeper = sleeper
        draw = torch.Generator().manual_seed(7)
        self.batches = torch.randn(NUM_STEPS, 2, 4, width, generator=draw).to(device)

    def forward(self, step):
        x, target = self.batches[step]
        for layer in self.stack.layers:
            x = x + torch.tanh(layer(x))
            if self.sleeper is not None:
                x = LateBackward.apply(x, self.sleeper)
        return (x - target).square().mean()


def grads_in_one_buffer(params):
    """Return (parameter, gradient) pairs: parts of one buffer, as a reducer of DDP has them."""
    params = list(params)
    buffer = torch.zeros(sum(p.numel() for p in params), device=params[0].device)
    parts = buffer.split([p.numel() for p in params])
    return [(p, part.view_as(p)) for p, part in zip(params, parts, strict=True)]


def train(rule, mode, *, drains=False, in_buffer=False, device="cuda", **settings):
    """Return the weights after a run, true ones."""
    model = Stack(device, **settings)
    config = rule if isinstance(rule, ZenFlowConfig) else config_of(rule)
    clipping = {"max_grad_norm": 0.3, "offload_gradients": mode} if mode == "release" else {}
    shared = grads_in_one_buffer(model.parameters()) if in_buffer else []
    optimizer = ZenFlowAdamW(model.parameters(), lr=1e-2, config=config, **clipping)
    with closing(optimizer):
        for step in range(NUM_STEPS):
            for param, grad in shared:
                param.grad = grad.zero_()
            model(step).backward()
            if mode == "keep":
                optimizer.clip_grad_norm_(0.3)
            optimizer.step()
            if drains:
                torch.cuda.synchronize()
        optimizer.eval()
        return weights_of(model)


@pytest.fixture
def late_copies(monkeypatch):
    def bind(device, wait_timeout):
        return CudaDevice(device, wait_timeout, LateCopies(device))

    def use():
        monkeypatch.setattr(assembly, "bind", bind)

    return use


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rule", RULES)
def test_copies_that_are_late_on_the_device_change_no_bit(rule, mode, late_copies):
    expected = train(rule, mode, drains=True)
    late_copies()
    assert_equal(train(rule, mode), expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rule", ["S 2", "S 3", "published"])
def test_a_backward_that_is_late_on_the_device_changes_no_bit(rule, mode, late_copies):
    """Hooks run long before the kernels whose gradients they take."""
    expected = train(rule, mode, drains=True)
    assert_equal(train(rule, mode, sleeper=Sleeper(1)), expected)
    late_copies()
    assert_equal(train(rule, mode, sleeper=Sleeper(2)), expected, "copies late as well")


@pytest.mark.parametrize("mode", MODES)
def test_memory_that_is_used_anew_at_once_changes_no_bit(mode, late_copies):
    """With little memory to spare, a freed gradient's place is the next one's."""
    wide = {"num_layers": 6, "width": 512}
    rule = ZenFlowConfig(update_interval=2, select_interval=3)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    expected = train(rule, mode, drains=True, **wide)
    # What a step that nothing drains holds longer: a segment of large tensors, two of small ones.
    spare = (20 + 2 * 2) * 2**20
    peak, total = torch.cuda.max_memory_reserved() + spare, torch.cuda.mem_get_info()[1]
    torch.cuda.empty_cache()
    late_copies()
    try:
        torch.cuda.set_per_process_memory_fraction(min(1.0, peak / total))
        assert_equal(train(rule, mode, **wide), expected)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("mode", MODES)
def test_a_buffer_that_every_backward_writes_anew_changes_no_bit(mode, late_copies):
    expected = train("S 3", mode, drains=True)
    late_copies()
    assert_equal(train("S 3", mode, in_buffer=True), expected)


@pytest.mark.parametrize(
    ("mode", "is_sharing"), [("keep", False), ("keep", True), ("release", True)]
)
def test_buckets_of_data_parallelism_change_no_bit(late_copies, tmp_path, mode, is_sharing):
    """One rank, whose averages are its own gradients, in the reducer's memory.

    Where hosts share the work, its all-gathers have one part.
    """
    expected = train("S 3", mode, drains=True)
    late_copies()
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        model = Stack("cuda")
        parallel = DistributedDataParallel(
            model, gradient_as_bucket_view=True, bucket_cap_mb=0.0005
        )
        optimizer = ZenFlowAdamW(
            model.parameters(),
            lr=1e-2,
            config=config_of("S 3"),
            offload_gradients=mode,
            process_group=parallel.process_group if is_sharing else None,
        )
        with closing(optimizer):
            if mode == "release":
                optimizer.release_from(parallel)
            for step in range(NUM_STEPS):
                parallel(step).backward()
                optimizer.clip_grad_norm_(0.3)
                optimizer.step()
            optimizer.eval()
            assert_equal(weights_of(model), expected)
    finally:
        torch.distributed.destroy_process_group()


@contextmanager
def refused_waits():
    """Yield what makes torch raise an error wherever an operation waits for the device."""
    try:
        yield lambda: torch.cuda.set_sync_debug_mode("error")
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("mode", MODES)
def test_no_step_waits_for_the_device_by_an_operation(mode):
    """Neither `item()`, nor `nonzero`, nor a copy from pageable memory, in any thread."""
    model = Stack("cuda")
    clipping = {"max_grad_norm": 0.3, "offload_gradients": mode} if mode == "release" else {}
    config = ZenFlowConfig(update_interval=3, select_interval=0, min_split_elements=1)
    with closing(ZenFlowAdamW(model.parameters(), config=config, **clipping)) as optimizer:
        with refused_waits() as refuse:
            for step in range(NUM_STEPS):
                if step == 10:  # behind the first selection
                    refuse()
                model(step).backward()
                if mode == "keep":
                    optimizer.clip_grad_norm_(0.3)
                optimizer.step()
        optimizer.synchronize()
        assert optimizer.report.step == NUM_STEPS


def test_a_pin_that_is_refused_leaves_no_error_for_the_next_kernel():
    runtime = CudaRuntime(torch.device("cuda", torch.cuda.current_device()))
    device = CudaDevice(runtime.device, 10.0, runtime)
    slab = device.pinned_slab(10_000, torch.uint8)
    try:
        assert runtime.register(slab) != 0  # pinned already
        assert float((torch.ones(3, device="cuda") + 1).sum()) == 6.0
    finally:
        device.close()


def test_the_plan_bounds_what_a_step_takes():
    """In memory that is in use, and not what the allocator holds for later."""
    model = Stack("cuda", num_layers=8, width=1024)
    with closing(
        ZenFlowAdamW(model.parameters(), offload_gradients="release", max_grad_norm=1.0)
    ) as optimizer:
        plan = optimizer.memory
        for step in range(8):
            model(step).backward()
            optimizer.step()
        torch.cuda.synchronize()
        between = torch.cuda.memory_stats()["active_bytes.all.current"]
        torch.cuda.reset_peak_memory_stats()
        for step in range(8, 16):
            model(step).backward()
            optimizer.step()
        torch.cuda.synchronize()
        taken = torch.cuda.memory_stats()["active_bytes.all.peak"] - between
    whole = 1024 * 1024 * 4
    # Beside the plan: two layers' gradients, what lands, and a fresh step's temporary.
    assert taken <= plan.device_step_bytes + 6 * whole


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_training_on_the_second_device_leaves_the_first_alone():
    program = """
import torch
from tests.zenflow.device.test_gpu_streams import train
train("S 3", "release", device="cuda:1")
assert not torch._C._cuda_hasPrimaryContext(0), "a thread has made a context on the first device"
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


def test_a_device_has_run_dry_once_its_work_is_over():
    device = CudaDevice(torch.device("cuda", torch.cuda.current_device()), wait_timeout=60.0)
    torch.cuda.synchronize()
    assert device.has_run_dry()
    torch.cuda._sleep(20 * LONGEST)
    assert not device.has_run_dry()
    torch.cuda.synchronize()
    assert device.has_run_dry()
    device.close()
