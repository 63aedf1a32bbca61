"""CUDA's runtime as the checker plays it."""

import contextlib

import torch

from tests.zenflow.races.checker import Event
from tests.zenflow.races.clocks import LOCK


class CheckedRuntime:
    """Streams that are agents; see `zenflow.device.runtime.CudaRuntime`, whose methods it has."""

    device = torch.device("cpu")

    used = None
    """Bytes that tensors have had, and those that they may have."""

    def __init__(self, checker):
        self._checker = checker

    def enter_thread(self, stream=None):
        self._checker.watch().__enter__()  # for the thread's life
        self._checker.stream = stream

    def new_stream(self):
        return self._checker.new_stream()

    def current_stream(self):
        return self._checker.stream

    @contextlib.contextmanager
    def on(self, stream):
        before, self._checker.stream = self._checker.stream, stream
        try:
            yield
        finally:
            self._checker.stream = before

    def record(self, stream, *, is_timed=False):
        return Event(self._checker, stream.launch(self._checker.thread).told())

    def is_idle(self, stream):
        return False  # nothing may be ordered by the answer

    def wait(self, stream, event):
        stream.launch(self._checker.thread, event.clock)

    def join(self, event, timeout):
        event.synchronize()
        return True

    def keep(self, tensor, stream):
        with LOCK:
            self._checker.memory.shadow(tensor).kept_for.add(stream)

    def pinned(self, size, dtype):
        return torch.empty(size, dtype=dtype)

    def empty(self, size, dtype):
        return self._checker.on_device(torch.empty(size, dtype=dtype))

    def resize(self, memory, num_bytes):
        """Only play it: who still used memory that is given up would crash in earnest."""
        storage, stream = memory.untyped_storage(), self._checker.stream
        with LOCK:
            stream.launch(self._checker.thread)
            self._checker.memory.end(storage.data_ptr())
            if num_bytes:
                self._checker.memory.shadow(memory, on_device=True, stream=stream, is_new=True)

    def memory_use(self):
        return self.used

    def register(self, slab):
        return 0

    def unregister(self, slab):
        """Count as a write: no copy may be under way from or to memory that is pinned no more."""
        self._checker.host_access([(slab, True)])

    def synchronize(self):
        for stream in self._checker.streams:
            self._checker.thread.learn(stream.seen_by(self._checker.thread))
