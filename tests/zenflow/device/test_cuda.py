"""The CUDA device on a runtime that the test plays: deadlines, clocks, pinned memory."""

import random
from types import SimpleNamespace

import pytest
import torch

from zenflow import DeadlineError
from zenflow.device import clock as clock_module
from zenflow.device import runtime as runtime_module
from zenflow.device.clock import TRUSTED_SECONDS
from zenflow.device.cuda import CudaDevice
from zenflow.device.runtime import CudaRuntime

DEVICE = torch.device("cpu")


class Clock:
    """The host's clock, which stands still but for what takes time."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        for module in (clock_module, runtime_module):
            monkeypatch.setattr(module.time, "perf_counter", lambda: self.now)


class Event:
    def __init__(self, passed_at, is_passed=True):
        self.passed_at, self._is_passed = passed_at, is_passed

    def query(self):
        return self._is_passed

    def elapsed_time(self, other):
        return 1e3 * (other.passed_at - self.passed_at)


class Runtime:
    """Streams that pass everything after a moment, or nothing after `hang`."""

    def __init__(self, clock=None, latency=lambda: 0.0, noticing=lambda: 0.0, drift=0.0):
        self.clock, self.latency, self.noticing = clock, latency, noticing
        self.drift = drift
        self.hangs = False
        self.registered, self.refuses = set(), False

    def new_stream(self):
        return object()

    current_stream = new_stream

    def record(self, stream, *, is_timed=False):
        if self.clock is None:
            return Event(0.0, not self.hangs)
        self.clock.now += self.latency()
        return Event(self.clock.now * (1.0 + self.drift))

    def join(self, event, timeout):
        if self.clock is not None:
            self.clock.now += self.noticing()
        return CudaRuntime.join(self, event, timeout)

    def pinned(self, size, dtype):
        return torch.empty(size, dtype=dtype)

    def register(self, slab):
        if self.refuses:
            return 2
        self.registered.add(slab.data_ptr())
        return 0

    def unregister(self, slab):
        self.registered.remove(slab.data_ptr())

    def synchronize(self):
        pass


# ---- deadlines ----------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["synchronize", "values", "seconds_of"])
def test_every_wait_for_the_device_has_a_deadline(call):
    runtime = Runtime()
    device = CudaDevice(DEVICE, 0.05, runtime)
    moment = device.timing_mark()
    runtime.hangs = True
    late = device.to_host(torch.ones(1))
    calls = {
        "synchronize": device.synchronize,
        "values": late.get,
        "seconds_of": lambda: device.seconds_of(device.timing_mark()),
    }
    with pytest.raises(DeadlineError, match=r"waited 0\.05 s for cpu.*wait_timeout"):
        calls[call]()
    device.seconds_of(moment)  # passed before


def test_a_wait_ends_soon_after_the_event():
    """Waiting asks again and again, with pauses that are a part of what was waited."""
    asked = []

    def query():
        asked.append(1)
        return len(asked) > 40

    event = SimpleNamespace(query=query)
    assert CudaRuntime.join(None, event, 5.0)
    assert len(asked) == 41


# ---- clocks -------------------------------------------------------------------------------------


def test_a_thread_that_notices_a_tie_late_moves_no_span(monkeypatch):
    """A tie is as good as the host's readings around it are close, in the best of several."""
    draw = random.Random(3)
    clock = Clock(monkeypatch)
    late = iter([5e-3, 3e-3, 8e-6, 4e-3] * 50)
    runtime = Runtime(clock, lambda: draw.uniform(0, 4e-6), lambda: next(late))
    device = CudaDevice(DEVICE, 1.0, runtime)
    for _ in range(8):
        moment = Event(clock.now)
        clock.now += TRUSTED_SECONDS / 3  # every few spans the clocks are tied anew
        assert device.seconds_of(moment) == pytest.approx(moment.passed_at, abs=6e-6)


def test_clocks_that_drift_are_tied_anew(monkeypatch):
    clock = Clock(monkeypatch)
    device = CudaDevice(DEVICE, 1.0, Runtime(clock, drift=1e-5))
    for _ in range(10):
        clock.now += TRUSTED_SECONDS / 2
        moment = device.timing_mark()
        assert device.seconds_of(moment) == pytest.approx(clock.now, abs=1e-5 * TRUSTED_SECONDS)


# ---- pinned memory ------------------------------------------------------------------------------


def test_slabs_are_unpinned_one_by_one_or_with_the_device():
    runtime = Runtime()
    device = CudaDevice(DEVICE, 1.0, runtime)
    slabs = [device.pinned_slab(count, torch.uint8) for count in (0, 10, 5000)]
    assert [slab.numel() for slab in slabs] == [0, 10, 5000]
    assert len(runtime.registered) == 2
    device.free_slab(slabs[1])
    device.free_slab(slabs[0])
    assert runtime.registered == {slabs[2].data_ptr()}
    device.close()
    device.close()
    assert not runtime.registered


def test_memory_that_cannot_be_pinned_is_an_error_that_says_how_much():
    runtime = Runtime()
    device = CudaDevice(DEVICE, 1.0, runtime)
    runtime.refuses = True
    with pytest.raises(RuntimeError, match=r"can't pin 5,000 bytes.*ulimit -l"):
        device.pinned_slab(5000, torch.uint8)
    device.close()


def test_no_page_is_pinned_twice():
    """CUDA pins whole pages, and refuses one that another optimizer has pinned."""
    device = CudaDevice(DEVICE, 1.0, Runtime())
    slabs = [device.pinned_slab(100, torch.uint8) for _ in range(20)]
    pages = [slab.data_ptr() // 4096 for slab in slabs]
    assert len(set(pages)) == len(slabs)
    assert all(slab.data_ptr() % 4096 == 0 for slab in slabs)
